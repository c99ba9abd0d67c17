"""Sets of patches that nest, overlap, pause and leave in any order; exceptions and threads."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from toystack import ToyStack, fused_norm, toy_rms_norm

from voxfuse.patches import PatchError, PatchWarning, registry
from voxfuse.patches.engine import apply_patches

ALREADY = "already applied by an earlier patch set"


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def installed(toy: ToyStack):
    return vars(toy.layers.Norm)["forward"]


def test_two_stacks_with_one_class_share_the_replacement_of_a_set(
    toy: ToyStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    cousin = dataclasses.replace(registry.STACKS["toyvoice"](), name="toycousin")
    monkeypatch.setitem(registry.STACKS, "toycousin", lambda: cousin)
    with apply(toy.voice()) as patches:
        assert {receipt.stack: (receipt.status, receipt.reason) for receipt in patches.receipts} == {
            "toyvoice": ("applied", None),
            "toycousin": ("applied", "shared with stack toyvoice"),
        }
        assert [receipt.reason for receipt in apply(toy.voice()).receipts] == [None, "shared with stack toyvoice"]


@pytest.mark.parametrize("target", ["class", "instance"])
def test_applying_twice_is_a_no_op_that_says_so(toy: ToyStack, target: str) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    what = "toyvoice" if target == "class" else model
    norm = model.blocks[0].norm

    def now():
        return installed(toy) if target == "class" else vars(norm).get("forward")

    untouched = now()
    outer = apply(what)
    first = now()
    inner = apply(what)
    assert now() is first
    assert (inner.receipts[0].status, inner.receipts[0].reason) == ("applied", ALREADY)
    with torch.no_grad():
        model(x)
    assert outer.receipts[0].calls == inner.receipts[0].calls == 2  # not doubled
    outer.revert()
    assert now() is first  # the inner set still holds it
    outer.revert()
    assert now() is first  # reverting again does nothing
    inner.revert()
    assert now() is untouched


def test_leaving_an_inner_set_restores_the_outer_one(toy: ToyStack) -> None:
    untouched = installed(toy)
    with apply("toyvoice"):
        outer = installed(toy)
        with apply("toyvoice", backend="interpreter") as inner:
            assert installed(toy) is not outer
            assert inner.receipts[0].reason is None
            assert inner.receipts[0].backend == "interpreter"
        assert installed(toy) is outer
    assert installed(toy) is untouched


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("target", ["class", "instance"])
def test_reverting_out_of_order(toy: ToyStack, order: tuple[int, ...], target: str) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    what = "toyvoice" if target == "class" else model
    untouched = installed(toy)
    sets = [apply(what), apply(what, backend="interpreter"), apply(what)]
    remaining = [0, 1, 2]
    for index in order:
        sets[index].revert()
        remaining.remove(index)
        before = [patches.receipts[0].calls for patches in sets]
        with torch.no_grad():
            model(x)
        grown = [sets[i].receipts[0].calls - before[i] for i in range(3)]
        assert grown == [2 if remaining and i == remaining[-1] else 0 for i in range(3)]  # the last one on top runs
    assert installed(toy) is untouched
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("class_first", [True, False])
@pytest.mark.parametrize("class_leaves_first", [True, False])
def test_class_and_instance_of_one_fusion_do_not_double(
    toy: ToyStack, class_first: bool, class_leaves_first: bool
) -> None:
    model, other, x = toy.voice(), toy.voice(), torch.randn(2, 8)
    untouched = installed(toy)
    first = apply("toyvoice" if class_first else model)
    second = apply(model if class_first else "toyvoice")
    on_class, on_model = (first, second) if class_first else (second, first)
    with torch.no_grad():
        model(x)
        assert (on_class.receipts[0].calls, on_model.receipts[0].calls) == (0, 2)
        other(x)
        assert (on_class.receipts[0].calls, on_model.receipts[0].calls) == (2, 2)
        leaving, staying = (on_class, on_model) if class_leaves_first else (on_model, on_class)
        leaving.revert()
        model(x)
        assert staying.receipts[0].calls == 4
    staying.revert()
    assert installed(toy) is untouched
    assert not any("forward" in vars(module) for module in model.modules())


def test_part_of_a_model_patched_before_the_whole(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    part, whole = apply(model.blocks[0]), apply(model)
    assert whole.receipts[0].reason == f"1 of 2 modules {ALREADY}"
    with torch.no_grad():
        model(x)
    assert (part.receipts[0].calls, whole.receipts[0].calls) == (1, 2)
    whole.revert()
    assert "forward" in vars(model.blocks[0].norm)
    assert "forward" not in vars(model.blocks[1].norm)
    part.revert()


@pytest.mark.parametrize("target", ["class", "instance"])
def test_paused_runs_untouched_code_and_resumes(toy: ToyStack, target: str) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    outer = apply("toyvoice")
    patches = apply("toyvoice" if target == "class" else model)
    with torch.no_grad():
        with patches.paused():
            with patches.paused():
                model(x)
            model(x)
        assert (outer.receipts[0].calls, patches.receipts[0].calls) == (0, 0)
        model(x)
        assert patches.receipts[0].calls == 2
    patches.revert(), outer.revert()


@pytest.mark.parametrize("target", ["class", "instance"])
def test_what_somebody_else_assigns_during_a_pause_stays(toy: ToyStack, target: str) -> None:
    model = toy.voice()
    norm = model.blocks[0].norm
    owner = toy.layers.Norm if target == "class" else norm

    def theirs(*arguments):
        return arguments[-1] * 0

    with apply("toyvoice" if target == "class" else model):
        again = apply("toyvoice" if target == "class" else model)
        message = "forward was replaced by somebody else while voxfuse was paused"
        with pytest.warns(PatchWarning, match=message), again.paused():
            owner.forward = theirs
        assert vars(owner)["forward"] is theirs
        assert torch.equal(norm(torch.ones(2, 8)), torch.zeros(2, 8))
        del owner.forward


def test_reverting_and_applying_while_paused(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    untouched = installed(toy)
    patches = apply("toyvoice")
    with patches.paused():
        patches.revert()
        later = apply("toyvoice")
        with torch.no_grad():
            model(x)
        assert installed(toy) is untouched
        assert later.receipts[0].calls == 0
    assert installed(toy) is not untouched
    later.revert()
    assert installed(toy) is untouched


def test_packs_survive_a_pause(toy: ToyStack) -> None:
    from voxfuse.kernels._packs import pack

    built = []

    def packing(original, run):
        def fused(self, x):
            doubled = pack(self, "double", [self.scale], lambda: built.append(1) or self.scale * 2)
            return toy_rms_norm(x, self.floor, doubled / 2, run=run)

        return fused

    toy.use(toy.patch("toy_norm", toy.norm_target, packing))
    model, x = toy.voice(), torch.randn(2, 8)
    with torch.no_grad(), apply(model) as patches:
        model(x)
        with patches.paused():
            model(x)
        model(x)
        assert len(built) == 2  # one per module
        model.double()(x.double())
        assert len(built) == 4  # moved to another dtype: packed again, no hook needed


def test_an_exception_in_a_patched_forward_leaves_the_model_usable(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with torch.no_grad(), apply(model) as patches:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 7))
        model(x)
        assert patches.receipts[0].status == "applied"
    with torch.no_grad():
        model(x)


def test_leaving_by_an_exception_reverts(toy: ToyStack) -> None:
    untouched = installed(toy)
    with pytest.raises(KeyError), apply("toyvoice"):
        raise KeyError("in the body")
    assert installed(toy) is untouched


def test_somebody_else_on_top_is_not_clobbered(toy: ToyStack) -> None:
    model, untouched = toy.voice(), installed(toy)
    for owner, what in ((toy.layers.Norm, "toyvoice"), (model.blocks[0].norm, model)):
        patches = apply(what)
        ours = vars(owner)["forward"]

        def theirs(*args, _ours=ours):
            return _ours(*args)

        _put(owner, theirs)
        with pytest.raises(PatchError, match=f"replaced by {__name__}"), patches.paused():
            pass
        assert f"already patched by {__name__}" in apply(what).receipts[0].reason
        with pytest.warns(PatchWarning, match=f"replaced by {__name__} since; undo that first"):
            patches.revert()
        assert vars(owner)["forward"] is theirs
        assert patches.receipts[0].status == "applied"  # and says so
        _put(owner, ours)
        patches.revert()
        assert patches.receipts[0].status == "reverted"
    assert installed(toy) is untouched


def _put(owner, value) -> None:
    if isinstance(owner, type):
        owner.forward = value
    else:
        vars(owner)["forward"] = value


def test_a_patched_model_is_not_kept_alive(toy: ToyStack) -> None:
    model = toy.voice()
    gone = weakref.ref(model)
    patches = apply(model)
    del model
    gc.collect()
    assert gone() is None
    patches.revert()
    assert patches.receipts[0].status == "reverted"


def test_a_forgotten_set_stays_until_the_process_ends(toy: ToyStack) -> None:
    model = toy.voice()
    apply(model)
    gc.collect()
    later = apply(model)
    assert later.receipts[0].reason == ALREADY
    later.revert()
    assert "forward" in vars(model.blocks[0].norm)


def test_threads_that_apply_and_revert_at_once(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    untouched, errors = installed(toy), []
    with torch.no_grad():
        expected = model(x)

    def work(number: int) -> None:
        try:
            for _ in range(4):
                with apply(*(("toyvoice", model) if number % 2 else (model,))), torch.no_grad():
                    torch.testing.assert_close(model(x), expected)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert installed(toy) is untouched
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_original_that_a_replacement_gets_is_upstreams_own(toy: ToyStack) -> None:
    originals = []

    def build(original, run):
        originals.append(original)
        return fused_norm(original, run)

    toy.use(toy.patch("toy_norm", toy.norm_target, build))
    untouched = installed(toy)
    with apply("toyvoice"), apply("toyvoice", backend="interpreter"), apply(toy.voice()):
        assert originals == [untouched] * 3


def test_somebody_who_removed_our_method_is_no_obstacle(toy: ToyStack) -> None:
    model, untouched = toy.voice(), installed(toy)
    for owner, what in ((toy.layers.Norm, "toyvoice"), (model.blocks[0].norm, model)):
        patches = apply(what)
        del owner.forward
        patches.revert()
        assert patches.receipts[0].status == "reverted"
    assert installed(toy) is untouched
