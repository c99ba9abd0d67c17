"""RMSNorm where only a GPU can tell: bits against eager's own, graphs, host cost."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.rmsnorm import ORDERS, add_rms_norm, reference, rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "rmsnorm gpu")
EPS = 1e-6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bits_are_eagers_where_the_sum_is_exact(order, dtype):
    """Elements of ±1 and ±2 in equal numbers: the sum of squares is exact in any order of summation.

    Not so the mean in fp32: torch multiplies by a rounded 1/896 on CUDA and divides on a CPU, as the kernel does.
    """
    x = torch.tensor([1.0, -2.0, 2.0, -1.0], device="cuda").repeat(9, 224).to(dtype)
    weight = (1 + 0.3 * torch.randn(896, device="cuda")).to(dtype)
    found, expected = rms_norm(x, weight, EPS, order, run=RUN), reference(x, weight, EPS, order)
    tolerance = 2 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hardly_any_bit_differs_from_eagers_on_ordinary_rows(dtype):
    x = torch.randn(64, 1024, device="cuda").to(dtype)
    weight = (1 + 0.3 * torch.randn(1024, device="cuda")).to(dtype)
    differing = rms_norm(x, weight, EPS, "cast_then_scale", run=RUN) != reference(x, weight, EPS, "cast_then_scale")
    assert differing.float().mean() < 1e-3


def test_replays_follow_their_inputs():
    x, residual = (torch.randn(4, 896, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(896, device="cuda", dtype=torch.bfloat16)
    add_rms_norm(x, residual, weight, EPS, "cast_then_scale", run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, total = add_rms_norm(x, residual, weight, EPS, "cast_then_scale", run=RUN)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(total, residual + x)
        torch.testing.assert_close(y, reference(total, weight, EPS, "cast_then_scale"), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_host_cost_of_a_call():
    x = torch.randn(1, 1, 896, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(896, device="cuda", dtype=torch.bfloat16)
    assert_cheap(lambda: rms_norm(x, weight, EPS, "cast_then_scale", run=RUN))
    assert_cheap(lambda: add_rms_norm(x, x, weight, EPS, "cast_then_scale", run=RUN))
    assert TALLIES.of(RUN.receipt).fallbacks == {}
