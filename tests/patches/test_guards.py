"""What must be left alone: changed sources, foreign patches, compiled and captured code, a missing toolchain."""

import functools
import gc
import linecache
import sys
import types
from pathlib import Path

import pytest
import torch
from toystack import ToyStack

from voxfuse.patches import PatchWarning, guards, switches
from voxfuse.patches.engine import apply_patches

COMPILED = "already compiled: apply voxfuse before torch.compile, or revert and compile again"


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


@pytest.fixture(autouse=True)
def nothing_left_compiled():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        gc.collect()


def test_source_sha256_is_that_of_the_dedented_text(toy: ToyStack) -> None:
    from hashlib import sha256

    norm = toy.layers.Norm
    text = (
        "def forward(self, x):\n    return x / (x.square().mean(-1, keepdim=True) + self.floor).sqrt() * self.scale\n"
    )
    assert guards.source_sha256(norm.forward) == sha256(text.encode()).hexdigest()

    @functools.wraps(norm.forward)
    def disguised(self, x):
        return x

    assert guards.source_sha256(disguised) != guards.source_sha256(norm.forward)
    under_no_grad = torch.no_grad()(norm.forward)  # a decorator that upstream itself may use
    assert guards.source_sha256(under_no_grad) == guards.source_sha256(norm.forward)
    with pytest.raises(TypeError, match="expected a Python function, got builtin_function_or_method"):
        guards.source_sha256(len)


def test_changed_upstream_source_is_skipped(toy: ToyStack) -> None:
    original = vars(toy.layers.Norm)["forward"]
    toy.use(*toy.all_patches[:1], sources={"1.1": {toy.norm_target: "0" * 64}, "1.2": {toy.norm_target: "1" * 64}})
    for target in ("toyvoice", toy.voice()):
        (receipt,) = apply(target).receipts
        assert (receipt.status, receipt.reason) == (
            "skipped",
            f"upstream changed: {toy.norm_target} (tested: 1.1, 1.2)",
        )
    assert vars(toy.layers.Norm)["forward"] is original


def test_a_change_in_what_is_absorbed_counts(toy: ToyStack) -> None:
    patch = toy.all_patches[1]
    toy.use(patch)
    hashes = {name: guards.source_sha256(guards.resolve(name).function) for name in patch.absorbs}
    toy.use(patch, sources={"1.2": {**hashes, toy.norm_target: "0" * 64}})
    assert apply("toyvoice").receipts[0].reason == f"upstream changed: {toy.norm_target} (tested: 1.2)"


def test_an_untested_release_with_identical_sources_is_applied(toy: ToyStack) -> None:
    toy.release("2.0")
    with apply("toyvoice") as patches:
        (receipt,) = patches.receipts
    assert receipt.status == "applied"
    assert receipt.reason == "untested version 2.0, sources identical to 1.2"
    toy.use(*toy.all_patches[:1], sources={"1.2": {toy.norm_target: "0" * 64}})
    assert apply("toyvoice").receipts[0].reason == (f"upstream changed: {toy.norm_target} (version 2.0; tested: 1.2)")


def test_a_renamed_upstream_is_a_changed_upstream(toy: ToyStack) -> None:
    layers = toy.layers
    layers.Standardise = layers.Norm
    del layers.Norm
    (receipt,) = apply("toyvoice").receipts
    assert receipt.reason == f"upstream changed: {toy.norm_target}: no class Norm (tested: 1.2)"


def test_a_foreign_patch_is_named_even_behind_wraps(toy: ToyStack) -> None:
    norm = toy.layers.Norm
    original = norm.forward

    @functools.wraps(original)
    def theirs(self, x):
        return original(self, x)

    for foreign in (theirs, functools.partial(theirs), torch.no_grad()(theirs)):
        norm.forward = foreign
        for target in ("toyvoice", toy.voice()):
            (receipt,) = apply(target).receipts
            assert (receipt.status, receipt.reason) == ("skipped", f"already patched by {__name__}")
        assert vars(norm)["forward"] is foreign
    norm.forward = original


def test_foreign_code_inside_upstreams_function_is_seen(toy: ToyStack) -> None:
    def theirs(self, x):
        return x

    toy.layers.Norm.forward.__code__ = theirs.__code__
    assert apply("toyvoice").receipts[0].reason == f"already patched by {__name__}"


def test_a_foreign_instance_attribute_leaves_that_module_alone(toy: ToyStack) -> None:
    model = toy.voice()
    first, second = (block.norm for block in model.blocks)

    def hooked(module, x):
        return type(module).forward(module, x)

    first.forward = functools.partial(hooked, first)  # the way of accelerate's hooks
    with apply(model) as patches:
        (receipt,) = patches.receipts
        assert (receipt.status, receipt.count) == ("applied", 1)
        assert receipt.reason == f"1 of 2 modules skipped: already patched by {__name__}"
        assert "forward" in vars(second)
    assert isinstance(vars(first)["forward"], functools.partial)
    second.forward = types.MethodType(hooked, second)
    assert apply(model).receipts[0].reason == f"already patched by {__name__}"


def test_a_hooked_part_of_what_is_absorbed_leaves_the_module_alone(toy: ToyStack) -> None:
    toy.use(toy.all_patches[1])
    model = toy.voice()
    norm = model.blocks[0].norm
    norm.forward = functools.partial(toy.layers.Norm.forward, norm)
    with apply(model) as patches:
        assert patches.receipts[0].count == 1
        assert "_residual" not in vars(model.blocks[0])


def test_a_subclass_with_a_method_of_its_own_is_left_alone(toy: ToyStack) -> None:
    class Louder(toy.layers.Norm):
        def forward(self, x):
            return super().forward(x) * 2

    class Same(toy.layers.Norm):
        pass

    model, x = toy.voice(), torch.randn(2, 8)
    model.blocks[0].norm, model.blocks[1].norm = Louder(8), Same(8)
    with torch.no_grad():
        before = model(x)
        with apply(model) as patches:
            (receipt,) = patches.receipts
            torch.testing.assert_close(model(x), before)
    assert (receipt.count, receipt.status) == (1, "applied")
    assert receipt.reason == f"1 of 2 modules skipped: Norm.forward is overridden by {__name__}.Louder"


def test_unreadable_sources_are_skipped(toy: ToyStack) -> None:
    Path(toy.layers.__file__).unlink()
    linecache.clearcache()
    assert f"the source of {toy.norm_target} cannot be read" in apply("toyvoice").receipts[0].reason


def test_compiled_models_are_refused(toy: ToyStack) -> None:
    model = toy.voice()
    compiled = torch.compile(model, backend="eager")
    for target in (compiled, model, model.blocks[0], "toyvoice"):
        (receipt,) = apply(target).receipts
        assert (receipt.status, receipt.reason) == ("skipped", COMPILED)
    del compiled
    gc.collect()
    with apply(model) as patches:
        assert patches.receipts[0].status == "applied"


def test_compiled_parts_of_a_model_are_refused_and_others_patched(toy: ToyStack) -> None:
    model = toy.voice()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    with apply(model) as patches:
        (receipt,) = patches.receipts
        assert (receipt.status, receipt.count) == ("applied", 1)
        assert receipt.reason == f"1 of 2 modules skipped: {COMPILED}"
    assert apply("toyvoice").receipts[0].reason == COMPILED


def test_modules_compiled_in_place_are_refused(toy: ToyStack) -> None:
    model = toy.voice()
    model.compile(backend="eager")
    assert apply(model).receipts[0].reason == COMPILED
    assert apply("toyvoice").receipts[0].reason == COMPILED
    other = toy.voice()
    other.blocks[1].norm.forward = torch.compile(other.blocks[1].norm.forward, backend="eager")
    assert COMPILED in apply(other).receipts[0].reason


def test_compiled_functions_that_reach_the_model_are_refused(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    method = torch.compile(model.forward, backend="eager")
    assert apply(model).receipts[0].reason == COMPILED
    del method
    gc.collect()

    def step(value):
        return model(value)

    compiled = torch.compile(step, backend="eager")
    compiled(x)
    assert apply("toyvoice").receipts[0].reason == COMPILED


def test_a_compiled_method_of_the_class_is_refused(toy: ToyStack) -> None:
    original = toy.layers.Norm.forward
    toy.layers.Norm.forward = torch.compile(original, backend="eager")
    assert apply("toyvoice").receipts[0].reason == COMPILED
    toy.layers.Norm.forward = original


def test_a_disabled_function_is_not_a_compiled_one(toy: ToyStack) -> None:
    model = toy.voice()
    outside = torch.compiler.disable(model.forward)
    with apply(model) as patches:
        assert patches.receipts[0].status == "applied"
    assert outside is not None


def test_taking_a_class_patch_from_a_compiled_model_warns(toy: ToyStack) -> None:
    """Dynamo does not guard a class's methods, so the compiled code would go on with the fused call unnoticed."""
    model, x = toy.voice(), torch.randn(2, 8)
    patches = apply("toyvoice")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
    message = r"still runs what it was compiled with: call torch\._dynamo\.reset"
    with pytest.warns(PatchWarning, match=message), patches.paused():
        pass
    with pytest.warns(PatchWarning, match="still runs"):
        patches.revert()


def test_captured_modules_are_refused(toy: ToyStack) -> None:
    model = toy.voice()
    captured = types.FunctionType((lambda *args: None).__code__, vars(torch.cuda.graphs))
    model.blocks[0].forward = captured  # what torch.cuda.make_graphed_callables leaves
    with apply(model) as patches:
        (receipt,) = patches.receipts
        assert receipt.count == 1
        assert receipt.reason == "1 of 2 modules skipped: captured in a CUDA graph: apply voxfuse before the capture"
    model.blocks[1].norm.forward = captured
    assert "captured in a CUDA graph" in apply(model).receipts[0].reason


def test_a_missing_toolchain_skips_triton(toy: ToyStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("voxfuse.patches.plan.backend_unavailable", lambda backend: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in apply("toyvoice", backend="triton").receipts[0].reason
    monkeypatch.setenv("CC", "gcc-99 -pipe")
    assert switches.toolchain_missing() == "no C compiler: CC is 'gcc-99 -pipe', which is not found; Triton needs one"
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.delenv("CC")
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert switches.toolchain_missing() == (
        f"no {tmp_path / 'Python.h'}: Triton needs Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
    )
    (tmp_path / "Python.h").touch()
    assert switches.toolchain_missing() is None
    with apply("toyvoice", backend="triton") as patches:
        assert patches.receipts[0].status == "applied"
