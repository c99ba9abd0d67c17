"""Heads turned as qk_norm_rope turns them, whose keys and values go into a cache."""

import pytest
import torch
from rope_cases import EPS, HALF, NONE, case, weights

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.qk_norm_rope import qk_norm_rope, reference
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(normed, per_row, device, run, poisoned_empty):
    q, k, cos, sin = case(rows=2, tokens=3, device=device, dtype=torch.bfloat16)
    v = torch.randn(2, 3, 4, 64).to(device, torch.bfloat16)[:, :, ::2]
    norm = (*weights(64, device, torch.bfloat16), EPS, "cast_then_scale") if normed else NONE
    slots = torch.tensor([[4, 5, 6], [0, 2, 1]] if per_row else [7, 3, 1], device=device)
    caches = [torch.randn(2, 2, 9, 64).to(device, torch.bfloat16)[:, :, :8] for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    result = qk_norm_rope_cached(q, k, v, *caches, slots, cos, sin, *norm, *HALF, run=run)
    both = qk_norm_rope(q, k, cos, sin, *norm, *HALF, run=run)
    for row in range(2):
        for token, slot in enumerate(slots[row] if per_row else slots):
            expected[0][row, :, slot], expected[1][row, :, slot] = both[row, token, 4:], v[row, token]
    assert torch.equal(result, both[:, :, :4])
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])
    again = [torch.zeros_like(cache) for cache in caches]
    plain = qk_norm_rope_cached.reference(q, k, v, *again, slots, cos, sin, *norm, *HALF)
    torch.testing.assert_close(plain, result, rtol=1e-2, atol=1e-2)
    for mine, other in zip(again, caches, strict=True):
        written = mine.abs().sum((1, 3)) > 0  # [rows, cache_len]
        assert written.sum() == 6
        here, there = (cache.transpose(1, 2)[written] for cache in (mine, other))
        torch.testing.assert_close(here, there, rtol=1e-2, atol=1e-2)
    assert not TALLIES.of(run.receipt).fallbacks


def test_a_slot_outside_the_cache_is_not_written(device, run):
    q, k, cos, sin = case(rows=1, tokens=2, device=device)
    caches = [torch.full((1, 2, 4, 64), 7.0, device=device) for _ in range(2)]
    slots = torch.tensor([4, -1], device=device)
    result = qk_norm_rope_cached(q, k, k, *caches, slots, cos, sin, *NONE, *HALF, run=run)
    assert all(torch.all(cache == 7.0) for cache in caches)
    assert torch.equal(result, reference(q, k, cos, sin, *NONE, *HALF)[:, :, :4])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_zero_sizes_write_nothing(shape, device, run):
    rows, tokens = shape
    q, k = torch.zeros(*shape, 4, 64, device=device), torch.zeros(*shape, 2, 64, device=device)
    cos, cache = torch.zeros(*shape, 64, device=device), torch.full((rows, 2, 8, 64), 7.0, device=device)
    slots = torch.zeros(tokens, dtype=torch.int64, device=device)
    result = qk_norm_rope_cached(q, k, k, cache, cache, slots, cos, cos, *NONE, *HALF, run=run)
    assert result.shape == q.shape and torch.all(cache == 7.0)


def test_envelope(device):
    q, k, cos, sin = case(device=device)
    cache, slots = torch.zeros(2, 2, 8, 64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    why = qk_norm_rope_cached.unsupported
    assert why(q, k, k, cache, cache, slots, cos, sin, *NONE, *HALF) is None
    assert "caches must be" in why(q, k, k, cache[:1], cache, slots, cos, sin, *NONE, *HALF)
    assert "slots must be" in why(q, k, k, cache, cache, slots[:2], cos, sin, *NONE, *HALF)
    assert "v must be" in why(q, k, k.half(), cache, cache, slots, cos, sin, *NONE, *HALF)
