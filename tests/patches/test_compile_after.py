"""torch.compile, inference mode and autograd modes after patching."""

import gc

import pytest
import torch
from toystack import ToyStack

from voxfuse.patches.engine import apply_patches


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


@pytest.fixture(autouse=True)
def nothing_left_compiled():
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.parametrize("target", ["class", "instance"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_patched_model_compiles_without_a_graph_break_and_counts(toy: ToyStack, target: str, compiler: str) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
        patches = apply("toyvoice" if target == "class" else model)
        compiled = torch.compile(model, backend=compiler, fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected)
        assert patches.receipts[0].calls == 6  # counted in the op, so compiled calls count as well
        del compiled
        torch._dynamo.reset()
        gc.collect()
        patches.revert()
        torch.testing.assert_close(model(x), expected)


def test_compiled_code_follows_an_instance_that_is_reverted(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with torch.no_grad():
        patches = apply(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        compiled(x)
        with patches.paused():
            compiled(x)
        assert patches.receipts[0].calls == 2
        compiled(x)
        assert patches.receipts[0].calls == 4
        patches.revert()
        compiled(x)
        assert patches.receipts[0].calls == 4


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_inference_modes(toy: ToyStack, mode) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with mode():
        expected = model(x)
        with apply(model) as patches:
            torch.testing.assert_close(model(x), expected)
            assert patches.receipts[0].calls == 2
    with mode(), apply("toyvoice", backend="interpreter") as patches:
        torch.testing.assert_close(model(x), expected)
        assert (patches.receipts[0].calls, patches.receipts[0].fallbacks) == (2, {})
