"""The README's quick start runs as it stands there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.weights
@pytest.mark.slow
def test_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)
    report, seconds = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "adain_conv_block" in report and "reference" in report
    assert "never called" not in report
    assert 0.5 < float(seconds.removesuffix(" seconds")) < 3
    receipts = {receipt.fusion: receipt for receipt in names["patches"].receipts}  # type: ignore[attr-defined]
    # 8 AdaIN + Snake blocks of 6 halves and one look at their input in the generator; 11 AdaIN + LeakyReLU blocks of 2
    # in decoder and predictor
    applied = {name: receipt.calls for name, receipt in receipts.items() if receipt.status == "applied"}
    assert applied == {
        "adain_conv_block": 8 * 13,
        "adain_leaky_relu": 11 * 2,
        "stft_polar": 1,
        "istft_polar": 1,
        "sine_source": 1,
    }
    assert all(receipt.fallbacks == {} for receipt in receipts.values())
