"""Public faults of patches that did nothing, or met an upstream they were not made for."""

import pytest
import torch
from toystack import ToyStack, fused_norm

from voxfuse.patches.engine import apply_patches
from voxfuse.patches.errors import PatchError


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def test_a_patch_that_never_fires_is_visible(toy: ToyStack) -> None:
    """Liger-Kernel #1175, #911, #920, #1470: the wrong symbol was patched (q_norm and k_norm missed), in silence."""
    missed = toy.patch("toy_residual", f"{toy.name}.layers:Strict.forward", lambda original, run: lambda self, x: x)
    toy.use(missed, toy.patch("toy_norm", toy.norm_target, fused_norm))
    model, x = toy.voice(), torch.randn(2, 8)
    with apply("toyvoice") as patches, torch.no_grad():
        model(x)
        receipt = patches.receipts[0]
        assert (receipt.status, receipt.calls) == ("applied", 0)
        assert "never called" in patches.report()
    with apply(model) as patches:
        receipt = patches.receipts[0]  # for a model, a class that is not in it is no success at all
    assert (receipt.status, receipt.count, receipt.reason) == ("skipped", 0, "no Strict in this model")
    with pytest.raises(PatchError, match="no Strict in this model"):
        apply(model, include=["toy_residual"], strict=True)


def test_a_symbol_that_is_not_there_is_no_silent_no_op(toy: ToyStack) -> None:
    """Liger-Kernel #1175, #920: assigning to a name that upstream never looks up created it, and succeeded."""
    wrong = f"{toy.name}.layers:Norm.forwards"
    toy.use(toy.patch("toy_norm", wrong, fused_norm), sources={"1.2": {wrong: "0" * 64}})
    (receipt,) = apply("toyvoice").receipts
    assert receipt.reason == f"upstream changed: {wrong}: no forwards (tested: 1.2)"
    assert not hasattr(toy.layers.Norm, "forwards")


@pytest.mark.parametrize("change", ["renamed", "rewritten"])
def test_a_new_upstream_release_is_skipped_not_guessed_at(toy: ToyStack, change: str) -> None:
    """Liger-Kernel #978, #1221, #1058: transformers 5 renamed what was patched.

    tests/patches/test_drift.py compares the recorded hashes with the installed release of every stack.
    """
    toy.release("5.0")
    layers = toy.layers
    if change == "renamed":
        layers.RMSNorm = layers.Norm
        del layers.Norm
    else:
        layers.Norm.forward = layers.Strict.forward  # written by upstream too, so only its text tells
    (receipt,) = apply("toyvoice").receipts
    assert receipt.status == "skipped"
    assert receipt.reason.startswith("upstream changed: ")
    assert toy.norm_target in receipt.reason
    assert "tested: 1.2" in receipt.reason
