"""A code predictor's attention where only a GPU can tell: fp64 at the real shapes, growth in a graph, host cost."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.small_attention import reference, small_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "small_attention gpu")
TAIL = 1e-6, "cast_then_scale", "half", [], False, False


def case(rows, q_heads, kv_heads, head_dim, dtype, capacity=16):
    """q, k, v, caches, slots, tables, norm weights; fp64 copies of it are the oracle's."""
    heads = torch.randn(rows, 1, q_heads + 2 * kv_heads, head_dim, device="cuda").to(dtype)
    caches = torch.randn(2, rows, kv_heads, capacity, head_dim, device="cuda").to(dtype)
    slots = torch.arange(rows, device="cuda") % capacity
    tables = (torch.randn(2, rows, 1, head_dim, device="cuda") * 3).to(dtype)
    weights = (1 + 0.3 * torch.randn(2, head_dim, device="cuda")).to(dtype)
    return [*heads.split([q_heads, kv_heads, kv_heads], dim=2), *caches, slots, *tables, *weights]


def doubles(tensors):
    return [x.double() if x.is_floating_point() else x.clone() for x in tensors]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(16, 8, 128), (16, 2, 128), (14, 2, 64), (16, 16, 64)], ids=str)
def test_same_precision_at_the_real_shapes(heads, dtype, same_precision):
    for rows, capacity in ((1, 16), (17, 16), (64, 32)):
        tensors = case(rows, *heads, dtype, capacity)
        exact = reference(*doubles(tensors), *TAIL, heads[2] ** -0.5)
        eager = reference(*[x.clone() for x in tensors], *TAIL, heads[2] ** -0.5)
        same_precision(small_attention(*tensors, *TAIL, heads[2] ** -0.5, run=RUN), eager, exact)
    assert TALLIES.of(RUN.receipt).fallbacks == {}


@torch.no_grad()
def test_one_graph_serves_every_length():
    tensors = case(2, 16, 8, 128, torch.bfloat16)
    tensors[3].zero_()
    tensors[4].zero_()
    slots = tensors[5].zero_()
    small_attention(*tensors, *TAIL, 128**-0.5, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = small_attention(*tensors, *TAIL, 128**-0.5, run=RUN)
        slots.add_(1)
    slots.zero_()
    others = [x.clone() for x in tensors]
    for step in range(16):
        for mine, other in zip(tensors[:3], others[:3], strict=True):
            mine.normal_()
            other.copy_(mine)
        others[5].fill_(step)
        graph.replay()
        expected = reference(*others, *TAIL, 128**-0.5)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        for mine, other in zip(tensors[3:5], others[3:5], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_host_cost_of_a_call():
    tensors = case(1, 16, 8, 128, torch.bfloat16)
    assert_cheap(lambda: small_attention(*tensors, *TAIL, 128**-0.5, run=RUN))
