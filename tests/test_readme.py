"""The README's quick start runs as it stands there, and its tables name what exists."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from voxfuse.__main__ import app
from voxfuse.doctor import VARIABLES

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
    applied = {name: receipt.calls for name, receipt in receipts.items() if receipt.calls}
    assert applied == {
        "adain_conv_block": 8 * 13,
        "adain_leaky_relu": 11 * 2,
        "stft_polar": 1,
        "istft_polar": 1,
        "sine_source": 1,
    }
    assert all(receipt.fallbacks == {} for receipt in receipts.values())


def section(title: str) -> str:
    return README.read_text(encoding="utf-8").split(f"## {title}")[1].split("\n## ")[0]


def test_the_command_table_names_the_commands_and_options_that_exist() -> None:
    offered = set(re.findall(r"^│ ([a-z]+) ", CliRunner().invoke(app, ["--help"]).stdout, re.MULTILINE))
    rows = re.findall(r"^\| `voxfuse ([a-z]+)(.*?)` \|", section("Command line"), re.MULTILINE)
    assert {name for name, _ in rows} == offered
    for name, usage in rows:
        words = [word for word in re.split(r"[ \[\]|\\]+", usage) if word]
        subcommand = [word for word in words if re.fullmatch(r"[a-z]+", word) and word not in ("kokoro", "cpu", "cuda")]
        subcommand = subcommand[:1] if name == "ledger" else []
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, *subcommand, "--help"])
        assert shown.exit_code == 0, (name, subcommand)
        for option in (word for word in words if word.startswith("--")):
            assert option in shown.stdout, f"voxfuse {name} has no {option}"


def test_the_variables_are_those_that_are_read() -> None:
    named = set(re.findall(r"`(VOXFUSE[A-Z_]*)(?:=.)?`", section("Environment variables")))
    assert named == set(VARIABLES)
