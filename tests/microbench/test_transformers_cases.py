"""Every committed decode case makes a contest whose arms agree."""

import pytest
import torch

from voxfuse.kernels._op import Run
from voxfuse.microbench.arms import contest
from voxfuse.microbench.cases import load_cases
from voxfuse.microbench.judge import error_fp64
from voxfuse.microbench.peers import LIBRARIES
from voxfuse.microbench.timer import HostClock

CASES = {  # whole steps: test_decode_step_cases.py
    judged.case.name: judged for judged in load_cases("transformers") if "family" not in judged.case.parameters
}
SMALL = [
    name for name in CASES if ("1 rows" in name or "2 rows" in name) and "2048 keys" not in name and "8192" not in name
]


@pytest.mark.parametrize("name", SMALL)
def test_a_contest_has_the_declared_signatures_and_agreeing_arms(name):
    judged = CASES[name]
    run = Run("reference", "test")
    made = contest(judged.fusion, judged.case, torch.device("cpu"), HostClock(), run, {"launch_floor_us": 1.0}, "eager")
    tensors = [value for value in made.sets[0] if isinstance(value, torch.Tensor)]
    for tensor, signature in zip(tensors, judged.case.tensors.values(), strict=True):
        assert (tuple(tensor.shape), tensor.stride()) == (signature.shape, signature.strides)
        assert str(tensor.dtype) == f"torch.{signature.dtype}"
    doubled = (v.double() if torch.is_tensor(v) and v.is_floating_point() else v for v in made.sets[0])
    oracle = made.seen(made.eager(*doubled))
    bound = 4 * torch.finfo(next(tensor.dtype for tensor in tensors if tensor.is_floating_point())).eps
    assert error_fp64(made.seen(made.voxfuse(*made.sets[0])), oracle) < bound
    for name, peer in made.baselines.items():
        assert isinstance(peer, str) == (name in LIBRARIES)  # not installed here, or without such an operation
        if not isinstance(peer, str):
            assert error_fp64(made.seen(peer(*made.sets[0])), oracle) < bound
