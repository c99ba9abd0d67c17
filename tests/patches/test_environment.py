"""What the environment says: off, fusions on and off, backend, strictness."""

import pytest
from toystack import ToyStack

from voxfuse.patches import PatchError
from voxfuse.patches.engine import apply_patches


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def test_voxfuse_0_is_off_everywhere(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXFUSE", "0")
    for target in ("toyvoice", toy.voice()):
        (receipt,) = apply(target, strict=True, include=["toy_norm"]).receipts
        assert (receipt.status, receipt.reason) == ("skipped", "VOXFUSE=0")


@pytest.mark.parametrize(
    ("name", "value"),
    [("VOXFUSE_BACKEND", "gpu"), ("VOXFUSE_FUSIONS", "toy_nrom"), ("VOXFUSE_STRICT", "yes")],
)
def test_voxfuse_0_wins_over_variables_that_cannot_be_obeyed(
    name: str, value: str, toy: ToyStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        apply_patches("toyvoice")
    monkeypatch.setenv("VOXFUSE", "0")
    (receipt,) = apply_patches("toyvoice").receipts
    assert (receipt.status, receipt.reason) == ("skipped", "VOXFUSE=0")


def test_fusions_from_the_environment(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.use(*toy.all_patches)
    monkeypatch.setenv("VOXFUSE_FUSIONS", "+toy_norm, -toy_gain")
    with apply("toyvoice", policy="bitwise", strict=True) as patches:
        norm, residual, gain = patches.receipts
    assert (norm.status, residual.status, gain.status) == ("applied", "skipped", "skipped")
    assert gain.reason == "excluded"
    with apply("toyvoice", include=["toy_residual"]) as patches:  # plus adds to the set asked for in code
        assert [receipt.status for receipt in patches.receipts] == ["applied", "applied", "skipped"]
    for value, message in {
        "toy_norm": r"expected \+name or -name, separated by commas, got 'toy_norm'",
        "+toy_nrom": "no fusion named 'toy_nrom'",
        "+toy_norm,-toy_norm": "toy_norm both on and off",
    }.items():
        monkeypatch.setenv("VOXFUSE_FUSIONS", value)
        with pytest.raises(ValueError, match=f"VOXFUSE_FUSIONS: {message}"):
            apply("toyvoice")


def test_backend_and_strict_from_the_environment(toy: ToyStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXFUSE_BACKEND", "reference")
    with apply_patches("toyvoice", policy="all") as patches:
        assert patches.receipts[0].backend == "reference"
    monkeypatch.setenv("VOXFUSE_STRICT", "1")
    with pytest.raises(PatchError):
        apply("vocos")
    monkeypatch.setenv("VOXFUSE_BACKEND", "gpu")
    with pytest.raises(ValueError, match="VOXFUSE_BACKEND: expected one of triton"):
        apply("toyvoice")
    monkeypatch.delenv("VOXFUSE_BACKEND")
    monkeypatch.setenv("VOXFUSE_STRICT", "yes")
    with pytest.raises(ValueError, match="VOXFUSE_STRICT: expected 0 or 1, got 'yes'"):
        apply("toyvoice")
