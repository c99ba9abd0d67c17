"""Public faults of patched model instances: half-patched models, lost attributes, restores that do not restore."""

import copy
import pickle

import pytest
import torch
from kokoro_parts import MODEL_PARTS
from torch import nn
from toystack import ToyStack

from voxfuse.patches.engine import apply_patches


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def test_patching_a_model_that_exists_already_leaves_no_half(toy: ToyStack) -> None:
    """Liger-Kernel #170, #199: patched after from_pretrained, half of the model stayed as it was, and nothing said so.

    The receipt counts the modules that were replaced, and every one of them runs fused.
    """
    model, x = toy.voice(), torch.randn(2, 8)
    norms = [module for module in model.modules() if isinstance(module, toy.layers.Norm)]
    with apply(model) as patches, torch.no_grad():
        assert patches.receipts[0].count == len(norms) == 2
        model(x)
        assert patches.receipts[0].calls == len(norms)
    with apply("toyvoice") as patches, torch.no_grad():  # the class: models built before count as well
        model(x)
        assert patches.receipts[0].calls == len(norms)


@pytest.mark.parametrize("part", MODEL_PARTS)
def test_attributes_printing_saving_and_copying_after_patching(part: str) -> None:
    """Liger-Kernel #392, #764, #765, #990: print(model) raised AttributeError ('in_place', 'row_mode').

    Nothing of an upstream module goes missing: here on Kokoro's own classes.
    """
    build, inputs = MODEL_PARTS[part]
    module = build().eval()
    with torch.no_grad():
        expected = module(*inputs())  # once untouched: weight norm then holds tensors that deepcopy takes
        before = repr(module), module.extra_repr(), {key: value.clone() for key, value in module.state_dict().items()}
        attributes = set(dir(module))
        with apply(module) as patches:
            assert any(receipt.status == "applied" for receipt in patches.receipts)
            state = module.state_dict()
            assert (repr(module), module.extra_repr()) == before[:2]
            assert state.keys() == before[2].keys()
            assert all(torch.equal(state[key], value) for key, value in before[2].items())
            assert attributes <= set(dir(module))
            module.load_state_dict(state)
            for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
                assert repr(twin) == before[0]
                torch.testing.assert_close(twin(*inputs()), expected)


def test_revert_restores_the_identical_attributes(toy: ToyStack) -> None:
    """Liger-Kernel #772: reverting an instance patch did not restore model.forward."""
    toy.use(*toy.all_patches)
    model = toy.voice()
    before = [dict(vars(module)) for module in model.modules()]
    classes = {name: dict(vars(kind)) for name, kind in vars(toy.layers).items() if isinstance(kind, type)}
    for target in (model, "toyvoice"):
        patches = apply(target)
        assert [dict(vars(module)) for module in model.modules()] != before or target == "toyvoice"
        patches.revert()
        for module, attributes in zip(model.modules(), before, strict=True):
            assert "forward" not in vars(module)
            assert vars(module).keys() == attributes.keys()
            assert all(vars(module)[name] is value for name, value in attributes.items())
        for name, attributes in classes.items():
            now = dict(vars(getattr(toy.layers, name)))
            assert now.keys() == attributes.keys()
            assert all(now[key] is value for key, value in attributes.items() if callable(value))


def test_another_model_and_torch_itself_stay_as_they_are(toy: ToyStack) -> None:
    """Liger-Kernel #242, #315, #1360: patches leaked through nn.LayerNorm and cross_entropy into other models."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
    torch_before = [dict(vars(kind)) for kind in kinds], dict(vars(nn.functional))
    model, other, x = toy.voice(), toy.voice(), torch.randn(2, 8)
    build, inputs = MODEL_PARTS["AdaINResBlock1"]
    block = build().eval()
    with torch.no_grad():
        expected = other(x)
        with apply(model) as patches, apply(block):
            assert torch.equal(other(x), expected)
            assert patches.receipts[0].calls == 0
            block(*inputs())
            assert ([dict(vars(kind)) for kind in kinds], dict(vars(nn.functional))) == torch_before


def test_classes_keep_their_names(toy: ToyStack) -> None:
    """Liger-Kernel #834, #629, #625: a class was renamed for everybody, and repr showed the wrong one."""
    model = toy.voice()
    names = [(type(module), type(module).__name__, type(module).__qualname__) for module in model.modules()]
    for target in (model, "toyvoice"):
        with apply(target):
            assert [
                (type(module), type(module).__name__, type(module).__qualname__) for module in model.modules()
            ] == names
            assert "Norm(channels=8)" in repr(model)
            assert model.blocks[0].norm.forward.__qualname__ == "Norm.forward"
