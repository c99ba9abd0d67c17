"""Rotary embedding where only a GPU can tell: eager's bits, graphs with moving slots, recompiles, host cost."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels import _launch
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.qk_norm_rope import qk_norm_rope, reference
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "qk_norm_rope gpu")
NONE = (None, None, 1e-6, "cast_then_scale")
HALF = ("half", (), False, False)


def case(rows, tokens, q_heads, kv_heads, head_dim, dtype):
    q, k = (torch.randn(rows, tokens, n, head_dim, device="cuda").to(dtype) for n in (q_heads, kv_heads))
    angles = torch.rand(rows, tokens, head_dim, device="cuda") * 6
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 700])
def test_rope_has_eagers_bits(tokens, dtype):
    q, k, cos, sin = case(2, tokens, 14, 2, 64, dtype)
    assert torch.equal(qk_norm_rope(q, k, cos, sin, *NONE, *HALF, run=RUN), reference(q, k, cos, sin, *NONE, *HALF))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_with_norm_hardly_any_bit_differs(dtype):
    q, k, cos, sin = case(2, 50, 16, 8, 128, dtype)
    norm = (*(1 + 0.3 * torch.randn(2, 128, device="cuda")).to(dtype), 1e-6, "cast_then_scale")
    differing = qk_norm_rope(q, k, cos, sin, *norm, *HALF, run=RUN) != reference(q, k, cos, sin, *norm, *HALF)
    assert differing.float().mean() < 1e-3


def test_token_counts_do_not_recompile():
    before = len(_launch._compiled)
    for tokens in range(1, 70):
        qk_norm_rope(*case(1, tokens, 14, 2, 64, torch.bfloat16), *NONE, *HALF, run=RUN)
    assert len(_launch._compiled) - before <= 4


def test_one_graph_writes_every_slot():
    q, k, cos, sin = case(3, 1, 16, 8, 128, torch.bfloat16)
    v = torch.randn_like(k)
    caches = [torch.zeros(3, 8, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.zeros(3, 1, device="cuda", dtype=torch.int64)
    call = (q, k, v, *caches, slots, cos, sin, *NONE, *HALF)
    qk_norm_rope_cached(*call, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = qk_norm_rope_cached(*call, run=RUN)
    expected = [torch.zeros_like(cache) for cache in caches]
    for cache in caches:
        cache.zero_()
    for step in range(5):
        slots.copy_(torch.tensor([[step], [step + 3], [31 - step]]))
        for tensor in (q, k, v):
            tensor.normal_()
        graph.replay()
        plain = qk_norm_rope_cached.reference(q, k, v, *expected, slots, cos, sin, *NONE, *HALF)
        assert torch.equal(y, plain)
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])


@torch.no_grad()
def test_host_cost_of_a_call():
    q, k, cos, sin = case(1, 1, 16, 8, 128, torch.bfloat16)
    weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
    assert_cheap(lambda: qk_norm_rope(q, k, cos, sin, weight, weight, 1e-6, "cast_then_scale", *HALF, run=RUN))
    assert TALLIES.of(RUN.receipt).fallbacks == {}
