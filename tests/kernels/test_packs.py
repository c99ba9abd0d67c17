"""Weight packs: made once, rebuilt when a source changes in any way, never part of the module."""

import copy
import pickle

import pytest
import torch

from voxfuse.kernels import _packs
from voxfuse.kernels._packs import pack


class Counted:
    def __init__(self, module):
        self.module, self.builds = module, 0

    def __call__(self):
        def build():
            self.builds += 1
            return self.module.weight * 2

        return pack(self.module, "doubled", [self.module.weight], build)


def test_built_once_and_rebuilt_after_an_edit():
    doubled = Counted(torch.nn.Linear(3, 3))
    assert torch.equal(doubled(), doubled()) and doubled.builds == 1
    with torch.no_grad():
        doubled.module.weight.add_(1)
    assert torch.equal(doubled(), doubled.module.weight * 2) and doubled.builds == 2


def test_rebuilt_after_load_state_dict_and_dtype():
    doubled = Counted(torch.nn.Linear(3, 3))
    doubled()
    doubled.module.load_state_dict(torch.nn.Linear(3, 3).state_dict())
    assert torch.equal(doubled(), doubled.module.weight * 2)
    doubled.module.to(torch.float64)
    assert doubled().dtype == torch.float64 and doubled.builds == 3


def test_no_gradient_reaches_a_pack():
    assert not Counted(torch.nn.Linear(3, 3))().requires_grad


def test_the_module_shows_no_trace_and_a_copy_packs_for_itself():
    doubled = Counted(torch.nn.Linear(3, 3))
    before = set(vars(doubled.module)), list(doubled.module.state_dict())
    doubled()
    assert (set(vars(doubled.module)), list(doubled.module.state_dict())) == before
    assert pickle.dumps(doubled.module)
    twin = Counted(copy.deepcopy(doubled.module))
    with torch.no_grad():
        twin.module.weight.zero_()
    assert torch.all(twin() == 0) and not torch.all(doubled() == 0)


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        doubled = Counted(torch.nn.Linear(3, 3))
        assert torch.equal(doubled(), doubled.module.weight * 2)


def test_inference_weights_given_new_values_are_packed_anew():
    with torch.inference_mode():
        doubled = Counted(torch.nn.Linear(3, 3))
        doubled()
        doubled.module.load_state_dict(torch.nn.Linear(3, 3).state_dict())
        assert torch.equal(doubled(), doubled.module.weight * 2)


def test_a_pack_of_a_pack_first_made_in_inference_mode_is_kept():
    doubled, builds = Counted(torch.nn.Linear(3, 3)), []
    with torch.inference_mode():
        for _ in range(3):
            twice = doubled()
            pack(doubled.module, "of it", [twice], lambda twice=twice: builds.append(twice) or twice + 1)
    assert doubled.builds == len(builds) == 1


def test_a_pack_made_inside_a_capture_is_not_kept(monkeypatch):
    doubled = Counted(torch.nn.Linear(3, 3))
    with monkeypatch.context() as capture:
        capture.setattr(_packs, "_finished", lambda sources: False)
        doubled()
    doubled()
    doubled()
    assert doubled.builds == 2, "one for the graph, one for every call after"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_call_behind_a_capture_that_packed_first_has_its_values():
    doubled = Counted(torch.nn.Linear(64, 64, device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = doubled()
    torch.testing.assert_close(doubled(), doubled.module.weight.detach() * 2)  # before any replay
    graph.replay()
    torch.testing.assert_close(captured, doubled.module.weight.detach() * 2)
