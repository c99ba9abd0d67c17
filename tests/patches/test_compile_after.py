"""torch.compile, inference mode and autograd modes after patching."""

import gc
import threading

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


def test_looking_for_compiled_models_disturbs_no_other_thread(toy: ToyStack) -> None:
    """``gc.get_objects`` would hold half-built tuples of other threads, which then raise SystemError."""

    toy.use(*toy.all_patches)
    faults: list[BaseException] = []
    done = threading.Event()

    def bystander() -> None:
        while not done.is_set():
            try:
                tuple(i for i in range(400))
            except SystemError as error:
                faults.append(error)

    thread = threading.Thread(target=bystander)
    thread.start()
    try:
        for _ in range(5):
            apply("toyvoice").revert()
    finally:
        done.set()
        thread.join()
    assert not faults
