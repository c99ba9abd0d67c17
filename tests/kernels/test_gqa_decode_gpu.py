"""Decode attention where only a GPU can tell: precision of its products, one graph for every length, host cost."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels import _launch
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.gqa_decode import gqa_decode, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "gqa_decode gpu")
HEADS = [(14, 2, 64), (16, 8, 128), (16, 2, 128), (16, 16, 64)]


def case(rows, q_heads, kv_heads, head_dim, capacity, dtype, tokens=1):
    q = torch.randn(rows, q_heads, tokens, head_dim, device="cuda").to(dtype)
    k, v = (torch.randn(rows, kv_heads, capacity, head_dim, device="cuda").to(dtype) for _ in range(2))
    return q, k, v


def error(value, oracle):
    return ((value.double() - oracle).norm() / oracle.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), HEADS)
def test_same_precision_at_the_real_shapes(q_heads, kv_heads, head_dim, dtype):
    for rows, capacity, tokens in ((1, 8192, 1), (8, 1000, 1), (3, 333, 16 if q_heads // kv_heads < 8 else 8)):
        q, k, v = case(rows, q_heads, kv_heads, head_dim, capacity, dtype, tokens)
        lengths = torch.randint(tokens, capacity + 1, (rows,), device="cuda")
        lengths[0] = capacity
        arguments = (lengths, None, head_dim**-0.5, True, 0)
        exact = reference(q.double(), k.double(), v.double(), *arguments)
        eager = error(reference(q, k, v, *arguments), exact)
        bound = max(1.25 * eager, torch.finfo(dtype).eps)
        found = error(gqa_decode(q, k, v, *arguments, run=RUN), exact)
        assert found <= bound, f"{rows} × {capacity}: error {found:.2e}, at most {bound:.2e}"


def test_one_graph_serves_every_length():
    q, k, v = case(2, 14, 2, 64, 4096, torch.bfloat16)
    lengths = torch.ones(2, device="cuda", dtype=torch.int64)
    call = (q, k, v, lengths, None, 0.125, True, 0)
    gqa_decode(*call, run=RUN)
    compiled = len(_launch._compiled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gqa_decode(*call, run=RUN)
    for pair in ((1, 4096), (17, 64), (65, 4095), (0, 1)):
        lengths.copy_(torch.tensor(pair))
        q.normal_()
        graph.replay()
        torch.testing.assert_close(y, reference(*call), rtol=2e-2, atol=2e-2)
    assert len(_launch._compiled) == compiled


def test_growing_caches_do_not_recompile():
    before = len(_launch._compiled)
    for capacity in range(64, 700, 7):
        gqa_decode(*case(1, 14, 2, 64, capacity, torch.bfloat16), None, None, 0.125, True, 0, run=RUN)
    assert len(_launch._compiled) - before <= 30  # specialised by divisibility, parts and the merge's width


def test_masks_and_windows():
    q, k, v = case(2, 16, 8, 128, 500, torch.float16, tokens=5)
    boolean = torch.rand(2, 1, 5, 500, device="cuda") > 0.3
    additive = torch.randn(1, 16, 5, 500, device="cuda", dtype=torch.float16)
    for mask, window in ((boolean, 0), (additive, 0), (None, 72), (boolean, 72)):
        arguments = (q, k, v, None, mask, 0.1, True, window)
        torch.testing.assert_close(gqa_decode(*arguments, run=RUN), reference(*arguments), rtol=1e-2, atol=5e-3)


@torch.no_grad()
def test_host_cost_of_a_call():
    q, k, v = case(1, 14, 2, 64, 32, torch.bfloat16)
    assert_cheap(lambda: gqa_decode(q, k, v, None, None, 0.125, True, 0, run=RUN))
    assert TALLIES.of(RUN.receipt).fallbacks == {}
