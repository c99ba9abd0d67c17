"""Attention of a code predictor's step in one launch: against fp64, against the kernels it stands for, the cache."""

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.small_attention import MAX_KEYS, reference, small_attention

EPS = 1e-6
TYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF = ("half", [], False, False)


def case(rows, q_heads, kv_heads, head_dim, slots, capacity=16, dtype=torch.float32, device="cpu", normed=True):
    """Arguments of small_attention; q, k and v are views of one projection, NaN wherever the cache holds nothing."""
    projected = torch.randn(rows, 1, q_heads + 2 * kv_heads, head_dim).to(device, dtype)
    q, k, v = projected.split([q_heads, kv_heads, kv_heads], dim=2)
    slots = torch.tensor(slots, device=device)
    caches = torch.randn(2, rows, kv_heads, capacity, head_dim).to(device, dtype)
    empty = torch.arange(capacity, device=device) >= slots.view(-1, 1, 1)
    caches = caches.masked_fill(empty.unsqueeze(-1), torch.nan)
    angles = slots.view(-1, 1, 1).cpu() * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.cat([angles, angles], dim=-1)
    weights = [(1 + 0.3 * torch.randn(head_dim)).to(device, dtype) if normed else None for _ in range(2)]
    tables = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
    return [q, k, v, *caches, slots, *tables, *weights, EPS, "cast_then_scale", *HALF, head_dim**-0.5]


def oracle(arguments):
    """The formula in fp64, head by head."""
    q, k, v, k_cache, v_cache, slots, cos, sin, q_weight, k_weight = (
        None if value is None else value.double() if value.is_floating_point() else value for value in arguments[:10]
    )
    scale, group = arguments[-1], q.shape[2] // k.shape[2]

    def turned(x, weight, b):
        if weight is not None:
            x = x / (x.square().mean() + EPS).sqrt() * weight
        half = x.shape[0] // 2
        return x * cos[b, 0] + torch.cat([-x[half:], x[:half]]) * sin[b, 0]

    y = torch.empty_like(q)
    for b, head in ((b, head) for b in range(q.shape[0]) for head in range(q.shape[2])):
        held, shared = int(slots.view(-1)[b]), head // group
        keys = torch.stack([*k_cache[b, shared, :held], turned(k[b, 0, shared], k_weight, b)])
        values = torch.stack([*v_cache[b, shared, :held], v[b, 0, shared]])
        y[b, 0, head] = torch.softmax(keys @ turned(q[b, 0, head], q_weight, b) * scale, 0) @ values
    return y


def cloned(arguments):
    """The same, with caches of its own; a reference may read where NaN is, so that is zero here."""
    caches = (cache.nan_to_num(0.0) for cache in arguments[3:5])
    return [*arguments[:3], *caches, *arguments[5:]]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("heads", [(4, 2, 128), (2, 2, 64), (7, 1, 64), (8, 1, 128), (3, 3, 72)], ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_same_precision_as_upstream(heads, normed, dtype, device, run, same_precision, poisoned_empty):
    arguments = case(3, *heads, [0, 7, 15], dtype=dtype, device=device, normed=normed)
    exact, eager = oracle(arguments), reference(*cloned(arguments))
    y = small_attention(*arguments, run=run)
    assert y.shape == eager.shape and y.dtype == dtype and y.is_contiguous()
    same_precision(y, eager, exact)
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("capacity", [1, 5, 16, MAX_KEYS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_length_up_to_the_cache(capacity, dtype, device, run, same_precision):
    lengths = list(range(capacity))
    arguments = case(capacity, 4, 2, 16, lengths, capacity, dtype, device)
    same_precision(small_attention(*arguments, run=run), reference(*cloned(arguments)), oracle(arguments))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_the_cache_is_written_as_by_qk_norm_rope_cached(normed, dtype, device, run):
    arguments = case(3, 4, 2, 64, [0, 3, 15], dtype=dtype, device=device, normed=normed)
    others = [cache.clone() for cache in arguments[3:5]]
    slots = arguments[5]
    query = qk_norm_rope_cached(*arguments[:3], *others, slots.view(-1, 1), *arguments[6:-1], run=run)
    apart = gqa_decode(query.transpose(1, 2), *others, slots + 1, None, arguments[-1], False, 0, run=run)
    y = small_attention(*arguments, run=run)
    for mine, other in zip(arguments[3:5], others, strict=True):
        assert torch.equal(mine.nan_to_num(99.0), other.nan_to_num(99.0)), "other bits, or other slots"
    torch.testing.assert_close(y, apart, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_slots_outside_the_cache_are_not_written(device, run):
    arguments = case(3, 2, 1, 32, [16, 400, -1], capacity=16, device=device)
    arguments[3:5] = [torch.randn(3, 1, 16, 32, device=device) for _ in range(2)]
    before = [cache.clone() for cache in arguments[3:5]]
    y = small_attention(*arguments, run=run)
    assert all(torch.equal(mine, other) for mine, other in zip(arguments[3:5], before, strict=True))
    assert torch.equal(y[2], torch.zeros_like(y[2])) and y[:2].isfinite().all() and (y[:2] != 0).all()


@pytest.mark.parametrize("layout", ["rows of slots", "int32", "one table", "strided cache", "sections"])
def test_layouts(layout, device, run, same_precision):
    arguments = case(2, 4, 2, 64, [5, 5], device=device)
    expected = arguments
    if layout == "rows of slots":
        arguments[5] = arguments[5].view(2, 1)
    elif layout == "int32":
        arguments[5] = arguments[5].int()
    elif layout == "one table":
        arguments[6:8] = [table[0] for table in arguments[6:8]]
        expected = [*arguments[:6], *(table.expand(2, 1, 64) for table in arguments[6:8]), *arguments[8:]]
    elif layout == "strided cache":
        layers = [cache.unsqueeze(2).expand(-1, -1, 3, -1, -1).contiguous() for cache in arguments[3:5]]
        arguments[3:5] = [layer[:, :, 1] for layer in layers]
    else:
        chosen = arguments[6:8]
        arguments[6:8] = [torch.stack([table, table + 1, table - 1]) for table in chosen]
        arguments[13] = [32, 0, 0]  # every column takes the first axis
        expected = [*arguments[:6], *chosen, *arguments[8:13], [], *arguments[14:]]
    exact = oracle(expected)
    y = small_attention(*arguments, run=run)
    same_precision(y, exact.float(), exact)
    assert not TALLIES.of(run.receipt).fallbacks


def test_zero_rows_return_at_once(device, run):
    arguments = case(0, 4, 2, 64, [], device=device)
    assert small_attention(*arguments, run=run).shape == (0, 1, 4, 64)


def test_envelope(device):
    def why(**changes):
        arguments = case(2, 4, 2, 64, [1, 2], device=device)
        for index, value in changes.items():
            arguments[int(index[1:])] = value(arguments[int(index[1:])])
        return small_attention.unsupported(*arguments)

    assert why() is None
    assert "[rows, 1, heads, head_dim]" in why(_0=lambda q: q.expand(2, 2, 4, 64))
    assert "at most 32 slots" in why(_3=lambda cache: torch.zeros(2, 2, 33, 64))
    assert "heads do not match" in why(_0=lambda q: torch.zeros(2, 1, 5, 64))
    assert "slots must be" in why(_5=lambda slots: slots[:1])
    assert "caches must be" in why(_3=lambda cache: torch.zeros(2, 3, 16, 64))
