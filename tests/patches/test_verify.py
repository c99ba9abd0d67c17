"""PatchSet.verify: errors per method against float64, and of the whole model."""

import math

import pytest
import torch
from torch import nn
from toystack import ToyStack, toy_rms_norm

from voxfuse.patches.engine import apply_patches
from voxfuse.patches.verify import relative_rms


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "interpreter", **options})


def test_relative_rms() -> None:
    reference = [torch.tensor([3.0, 4.0]), torch.tensor(7)]  # integers are not compared
    assert relative_rms([torch.tensor([3.0, 4.5]), torch.tensor(8)], reference) == pytest.approx(0.1)
    assert relative_rms(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_rms(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_rms(torch.ones(3), torch.ones(2)) == math.inf
    assert relative_rms(torch.tensor([1j]), torch.tensor([1.0 + 0j])) == pytest.approx(math.sqrt(2))
    assert relative_rms(torch.tensor(1), torch.tensor(2)) is None


def own_error(module: nn.Module, x: torch.Tensor, function) -> float:
    """By hand: the relative RMS error of a float32 normalisation against the same in float64."""
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + module.floor.double()).sqrt() * module.scale.double()
    return float((function(x).double() - exact).norm() / exact.norm())


def test_an_instance(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(4, 8)
    patches = apply(model)
    attributes = [dict(vars(module)) for module in model.modules()]
    found = patches.verify(x)
    assert [method.module for method in found.methods] == ["blocks.0.norm", "blocks.1.norm"]
    norm = model.blocks[0].norm
    first = found.methods[0]
    with torch.no_grad():
        untouched = own_error(norm, x, lambda x: type(norm).forward(norm, x))
        patched = own_error(norm, x, lambda x: toy_rms_norm.launch(x, norm.floor, norm.scale))
    assert first.untouched == pytest.approx(untouched, rel=1e-6)
    assert first.patched == pytest.approx(patched, rel=1e-6)
    assert untouched != patched
    assert 0 < found.model_error < 1e-6
    assert "blocks.0.norm.forward [toy_norm], 1 calls: against float64, untouched" in str(found)
    for module, before in zip(model.modules(), attributes, strict=True):
        assert vars(module).keys() == before.keys()  # nothing of the measurement is left
    assert norm.forward.__func__ is vars(norm)["forward"].__func__
    patches.revert()


def test_a_wrong_patch_is_found_at_its_method_only(toy: ToyStack) -> None:
    def wrong(original, run):
        def fused(self, x):
            return original(self, x) * (1.001 if self.scale[0] > 1 else 1)

        return fused

    toy.use(toy.patch("toy_norm", toy.norm_target, wrong))
    model, x = toy.voice(), torch.randn(4, 8)
    with torch.no_grad():
        model.blocks[0].norm.scale[0], model.blocks[1].norm.scale[0] = 0.5, 1.5
    with apply(model) as patches:
        right, faulty = patches.verify(x).methods
    assert right.patched == right.untouched  # inputs are forced: an error does not travel
    assert faulty.patched == pytest.approx(1e-3, rel=1e-3)


def test_a_stack_takes_the_model_first(toy: ToyStack) -> None:
    toy.use(*toy.all_patches)
    model, x = toy.voice(), torch.randn(4, 8)
    with apply("toyvoice") as patches:
        found = patches.verify(model, x)
        assert [(method.method, method.note) for method in found.methods] == [
            ("forward", None),
            ("forward", None),
            ("_residual", None),
            ("_residual", None),
        ]
        assert all(method.patched < 1e-6 for method in found.methods)
        with pytest.raises(TypeError, match="expected the model as first argument, got Tensor"):
            patches.verify(x)


class Noisy(nn.Module):
    """Draws noise, keeps state, changes its input in place."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.calls = norm, 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        x += torch.randn_like(x)
        return {"audio": self.norm(x)}


def test_both_runs_see_the_same_noise_and_inputs(toy: ToyStack) -> None:
    model, x = Noisy(toy.layers.Norm(8)), torch.randn(4, 8)
    kept = x.clone()
    with apply(model) as patches:
        state = torch.get_rng_state()
        found = patches.verify(x)
        assert torch.equal(torch.get_rng_state(), state)
    assert found.model_error < 1e-6
    assert torch.equal(x, kept)
    assert model.calls == 2


def test_where_there_is_no_oracle_the_note_says_why(toy: ToyStack) -> None:
    def same(original, run):
        return lambda self, x: original(self, x)

    toy.use(toy.patch("toy_norm", f"{toy.name}.layers:Strict.forward", same))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.strict, self.noisy, self.idle = toy.layers.Strict().eval(), toy.layers.Strict(), toy.layers.Strict()

        def forward(self, x):
            return self.noisy(self.strict(x))

    model, x = Model(), torch.randn(4, 8)
    with apply(model) as patches:
        found = patches.verify(x)
        strict, noisy, idle = found.methods
    assert strict.note == "no float64 oracle: expected float32, got torch.float64"
    assert noisy.note == "draws random numbers, which differ in float64"
    assert (idle.calls, idle.note) == (0, "never called")
    assert [method.patched for method in found.methods] == [None, None, None]
    assert found.model_error == 0
    assert "untouched –, patched – (never called)" in str(found)


def test_weight_norm_and_dataclasses(toy: ToyStack) -> None:
    """Old weight norm leaves a non-leaf tensor on the module, which deepcopy refuses."""
    from dataclasses import dataclass

    @dataclass
    class Output:
        audio: torch.Tensor

    class Spoken(nn.Module):
        def __init__(self, voice):
            super().__init__()
            self.voice = voice

        def forward(self, x):
            return Output(self.voice(x))

    toy.use(toy.all_patches[1])
    voice = toy.voice()
    for block in voice.blocks:
        torch.nn.utils.weight_norm(block.proj)
    model, x = Spoken(voice), torch.randn(4, 8)
    with apply(model) as patches:
        found = patches.verify(x)
    assert 0 < found.model_error < 1e-6
    assert all(method.patched < 1e-6 and method.note is None for method in found.methods)
