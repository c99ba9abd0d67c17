"""SwiGLU where only a GPU can tell: bits against eager's own, graphs, host cost."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.swiglu import reference, swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "swiglu gpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hardly_any_bit_differs_from_eagers(dtype):
    gate, up = torch.randn(2, 64, 4864, device="cuda").to(dtype)
    differing = swiglu(gate, up, run=RUN) != reference(gate, up)
    assert differing.float().mean() < 1e-3


def test_replays_follow_their_inputs():
    packed = torch.randn(4, 1, 2 * 3072, device="cuda", dtype=torch.bfloat16)
    gate, up = packed.chunk(2, dim=-1)
    swiglu(gate, up, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = swiglu(gate, up, run=RUN)
    for _ in range(3):
        packed.normal_()
        graph.replay()
        torch.testing.assert_close(y, reference(gate, up), rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_host_cost_of_a_call():
    gate, up = torch.randn(2, 1, 1, 4864, device="cuda", dtype=torch.bfloat16)
    assert_cheap(lambda: swiglu(gate, up, run=RUN))
    assert TALLIES.of(RUN.receipt).fallbacks == {}
