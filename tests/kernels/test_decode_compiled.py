"""The decode operations under Dynamo: one graph, the same results, and a cache that is written."""

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope import qk_norm_rope
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.rmsnorm import add_rms_norm, rms_norm
from voxfuse.kernels.skinny_gemm import skinny_linear, skinny_swiglu
from voxfuse.kernels.small_attention import small_attention
from voxfuse.kernels.swiglu import swiglu

ROPE = (None, None, 1e-6, "cast_then_scale", "half", [], False, False)


def cases(device):
    q, k = (torch.randn(1, 1, heads, 16, device=device) for heads in (2, 1))
    cos, sin = torch.randn(2, 1, 1, 16, device=device)
    x = torch.randn(2, 16, device=device)
    cache = torch.randn(1, 1, 8, 16, device=device)
    return {
        rms_norm: (x, x[0], 1e-6, "cast_then_scale"),
        add_rms_norm: (x, x + 1, x[0], 1e-6, "one_plus"),
        swiglu: (x, x),
        qk_norm_rope: (q, k, cos, sin, *ROPE),
        skinny_linear: (x, cache[0, 0], None, None, x[0], 1e-6, "cast_then_scale"),
        skinny_swiglu: (x, cache[0, 0], cache[0, 0] + 1, None, None, None, 0.0, "cast_then_scale"),
        gqa_decode: (q.transpose(1, 2), cache, cache, None, None, 0.25, True, 0),
    }


@pytest.mark.parametrize("index", range(7))
def test_one_graph_with_the_same_result(index, device, run):
    op, arguments = list(cases(device).items())[index]
    expected = op(*arguments, run=run)
    compiled = torch.compile(lambda: op(*arguments, run=run), fullgraph=True, backend="aot_eager")
    found = compiled()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert TALLIES.of(run.receipt).calls == 2 and not TALLIES.of(run.receipt).fallbacks
    torch.compiler.reset()


def test_a_compiled_step_writes_its_cache(device, run):
    q, k, v = (torch.randn(1, 1, heads, 16, device=device) for heads in (2, 1, 1))
    cos, sin = torch.randn(2, 1, 1, 16, device=device)
    slots = torch.tensor([3], device=device)
    caches = [torch.zeros(1, 1, 8, 16, device=device) for _ in range(4)]
    expected = qk_norm_rope_cached(q, k, v, *caches[:2], slots, cos, sin, *ROPE, run=run)

    def step(k_cache, v_cache):
        return qk_norm_rope_cached(q, k, v, k_cache, v_cache, slots, cos, sin, *ROPE, run=run)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*caches[2:])
    assert torch.equal(found, expected) and torch.equal(caches[2], caches[0]) and torch.equal(caches[3], caches[1])
    small = small_attention(
        q, k, v, *(torch.zeros_like(cache) for cache in caches[:2]), slots, cos, sin, *ROPE, 0.25, run=run
    )

    def short(k_cache, v_cache):
        return small_attention(q, k, v, k_cache, v_cache, slots, cos, sin, *ROPE, 0.25, run=run)

    caches[2:] = [torch.zeros_like(cache) for cache in caches[:2]]
    found = torch.compile(short, fullgraph=True, backend="aot_eager")(*caches[2:])
    assert torch.equal(found, small) and torch.equal(caches[2], caches[0])
    assert caches[2][0, 0, 3].abs().sum() > 0 and torch.equal(caches[3][0, 0, 3], v[0, 0, 0])
    torch.compiler.reset()
