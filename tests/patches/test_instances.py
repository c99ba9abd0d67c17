"""A patched instance behaves as upstream's: printed, saved, copied, pickled, moved, loaded."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from toystack import ToyStack

from voxfuse.patches.engine import apply_patches

LOAD_WITHOUT_VOXFUSE = """
import pickle, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "voxfuse":
            raise ImportError("voxfuse is not installed here")

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, sys.argv[1])
import torch
with open(sys.argv[2], "rb") as file:
    model, method, x, expected = pickle.load(file)
with torch.no_grad():
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
upstream = type(model.blocks[0].norm).forward
assert model.blocks[0].norm.forward.__func__ is upstream, model.blocks[0].norm.forward
assert method.__func__ is upstream
assert "voxfuse" not in sys.modules
"""


def apply(*targets, **options):
    return apply_patches(*targets, **{"policy": "all", "backend": "reference", **options})


def test_print_names_and_state_are_upstreams(toy: ToyStack) -> None:
    model = toy.voice()
    before = repr(model), list(model.state_dict()), [type(module).__name__ for module in model.modules()]
    norm = model.blocks[0].norm
    signature, name = toy.layers.Norm.forward.__doc__, toy.layers.Norm.forward.__qualname__
    with apply(model):
        assert (repr(model), list(model.state_dict()), [type(module).__name__ for module in model.modules()]) == before
        assert (norm.forward.__name__, norm.forward.__qualname__, norm.forward.__doc__) == ("forward", name, signature)


def test_a_deep_copy_stays_patched_with_itself(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    patches = apply(model)
    twin = copy.deepcopy(model)
    norm = twin.blocks[0].norm
    assert vars(norm)["forward"].__self__ is norm
    with torch.no_grad():
        for block in twin.blocks:
            block.norm.scale.fill_(0.5)
        expected, calls = twin(x), patches.receipts[0].calls
        assert calls == 2  # the copy's calls count on the receipt of the set that patched its original
        patches.revert()
        torch.testing.assert_close(twin(x), expected)
        with apply(twin) as own:  # a copy can be taken over, and put back to upstream's state
            assert (own.receipts[0].status, own.receipts[0].count) == ("applied", 2)
            twin(x)
            assert own.receipts[0].calls == 2
        assert "forward" not in vars(norm)
        torch.testing.assert_close(twin(x), expected)


def test_a_pickle_loads_where_voxfuse_is_not_installed(toy: ToyStack, tmp_path) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with torch.no_grad():
        expected = model(x)
    path = tmp_path / "model.pickle"
    with apply(model):
        path.write_bytes(pickle.dumps((model, model.blocks[0].norm.forward, x, expected)))
    command = [sys.executable, "-c", LOAD_WITHOUT_VOXFUSE, str(toy.folder), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_pickle_in_the_same_process_is_upstreams_and_can_be_patched(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with apply(model) as patches, torch.no_grad():
        expected = model(x)
        twin = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(twin(x), expected)
        assert patches.receipts[0].calls == 2  # of the model only: the loaded one runs upstream's own method
        with apply(twin) as own:
            assert own.receipts[0].count == 2  # its bound upstream method is nobody's patch
            twin(x)
            assert own.receipts[0].calls == 2
    assert "forward" not in vars(twin.blocks[0].norm)


def test_torch_save_of_a_patched_model(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    buffer = io.BytesIO()
    with apply(model), torch.no_grad():
        expected = model(x)
        torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moving_to_another_dtype(toy: ToyStack, dtype: torch.dtype) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    plain = copy.deepcopy(model).to(dtype)
    with apply(model) as patches, torch.no_grad():
        model.to(dtype)
        torch.testing.assert_close(model(x.to(dtype)), plain(x.to(dtype)), rtol=0, atol=0)
        assert patches.receipts[0].calls == 2


def test_a_new_state_dict(toy: ToyStack) -> None:
    model, other, x = toy.voice(), toy.voice(), torch.randn(2, 8)
    with apply(model), torch.no_grad():
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x))


def test_class_patches_leave_pickles_and_copies_alone(toy: ToyStack) -> None:
    model, x = toy.voice(), torch.randn(2, 8)
    with apply("toyvoice"), torch.no_grad():
        expected = model(x)
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        method = pickle.loads(pickle.dumps(toy.layers.Norm.forward))
        assert method is toy.layers.Norm.forward
    for twin in twins:
        assert not any("forward" in vars(module) for module in twin.modules())
        torch.testing.assert_close(twin(x), expected)


def test_outside_the_envelope_and_with_gradients(toy: ToyStack) -> None:
    """Calls that a kernel cannot take run upstream's chain and are counted with their reason, never in silence."""
    model, x = toy.voice(), torch.randn(2, 8)
    with apply(model, backend="interpreter") as patches:
        model(x).sum().backward()
        assert patches.receipts[0].fallbacks == {
            "an input needs a gradient; call under torch.no_grad() or torch.inference_mode()": 2
        }
        assert all(parameter.grad is not None for parameter in model.parameters())
        with torch.no_grad():
            model.double()(x.double())
        assert patches.receipts[0].fallbacks["dtype is torch.float64, expected float32"] == 2
        assert patches.receipts[0].calls == 0
