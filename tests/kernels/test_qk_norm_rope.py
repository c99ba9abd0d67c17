"""Rotary embedding with and without the heads' norm, against the upstream functions; and the cache write."""

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.qk_norm_rope import qk_norm_rope, reference, split_heads
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached

EPS = 1e-6
TYPES = (torch.float32, torch.float16, torch.bfloat16)
NONE = (None, None, EPS, "cast_then_scale")
HALF = ("half", (), False, False)


def heads(rows, tokens, count, head_dim, device, dtype):
    return torch.randn(rows, tokens, count, head_dim).to(device, dtype)


def tables(shape, width, device, dtype, start=0):
    """cos and sin [*shape, width] of growing positions, as LlamaRotaryEmbedding makes them."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    positions = start + torch.arange(torch.Size(shape).numel()).view(shape)
    angles = positions[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def case(rows=2, tokens=3, q_heads=4, kv_heads=2, head_dim=64, width=None, *, device, dtype=torch.float32):
    q, k = (heads(rows, tokens, count, head_dim, device, dtype) for count in (q_heads, kv_heads))
    return q, k, *tables((rows, tokens), width or head_dim, device, dtype)


def weights(head_dim, device, dtype):
    return tuple((1 + 0.3 * torch.randn(head_dim)).to(device, dtype) for _ in range(2))


def doubles(*values):
    return [value.double() if isinstance(value, torch.Tensor) else value for value in values]


def upstream(function, q, k, cos, sin, *more):
    q, k = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin, *more)
    return torch.cat([q, k], dim=1).transpose(1, 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"),
    [(7, 1, 64), (2, 2, 72), (3, 1, 80), (4, 2, 96), (4, 2, 128), (1, 1, 160)],
)
def test_rope_is_bitwise_llamas(q_heads, kv_heads, head_dim, dtype, device, run, poisoned_empty):
    apply_rotary_pos_emb = pytest.importorskip("transformers.models.llama.modeling_llama").apply_rotary_pos_emb

    q, k, cos, sin = case(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, device=device, dtype=dtype)
    result = qk_norm_rope(q, k, cos, sin, *NONE, *HALF, run=run)
    expected = upstream(apply_rotary_pos_emb, q, k, cos, sin)
    assert result.dtype == expected.dtype and torch.equal(result, expected)
    turned_q, turned_k = split_heads(result, q_heads)
    assert turned_q.shape == (2, q_heads, 3, head_dim) and torch.equal(turned_k, expected.transpose(1, 2)[:, q_heads:])
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("dtype", TYPES)
def test_interleaved_partial_rope_is_bitwise_glms(dtype, device, run, poisoned_empty):
    apply_rotary_pos_emb = pytest.importorskip("transformers.models.glm.modeling_glm").apply_rotary_pos_emb

    q, k, cos, sin = case(head_dim=96, width=48, device=device, dtype=dtype)
    result = qk_norm_rope(q, k, cos, sin, *NONE, "interleaved", (), False, False, run=run)
    assert torch.equal(result, upstream(apply_rotary_pos_emb, q, k, cos, sin))


def test_interleaved_columns_turn_as_complex_numbers(device, run, poisoned_empty):
    q, k, cos, sin = case(head_dim=80, width=32, device=device)
    cos, sin = (table[..., :16].repeat_interleave(2, dim=-1) for table in (cos, sin))
    result = qk_norm_rope(q, k, cos, sin, *NONE, "interleaved_columns", (), False, False, run=run)
    turn = torch.complex(cos[..., ::2].double(), sin[..., ::2].double())[:, :, None]
    for part, x in ((result[:, :, :4], q), (result[:, :, 4:], k)):
        turned = torch.view_as_real(torch.view_as_complex(x[..., :32].double().unflatten(-1, (16, 2))) * turn).flatten(
            -2
        )
        torch.testing.assert_close(part[..., :32].double(), turned, rtol=1e-5, atol=1e-6)
        assert torch.equal(part[..., 32:], x[..., 32:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_wide_order_is_bitwise_the_vision_towers(dtype, device, run, poisoned_empty):
    apply_rotary_pos_emb_vision = pytest.importorskip(
        "transformers.models.qwen2_vl.modeling_qwen2_vl"
    ).apply_rotary_pos_emb_vision

    q, k, _, _ = case(rows=1, tokens=5, head_dim=80, device=device, dtype=dtype)
    cos, sin = tables((5,), 80, device, torch.float32)
    result = qk_norm_rope(q, k, cos, sin, *NONE, "half", (), False, True, run=run)
    expected = torch.cat(apply_rotary_pos_emb_vision(q[0], k[0], cos, sin), dim=1)[None]
    assert result.dtype == dtype and torch.equal(result, expected)


def test_tables_in_fp32_promote_as_upstream_does(device, run):
    apply_rotary_pos_emb = pytest.importorskip("transformers.models.llama.modeling_llama").apply_rotary_pos_emb

    q, k, _, _ = case(device=device, dtype=torch.bfloat16)
    cos, sin = tables((1, 3), 64, device, torch.float32)
    result = qk_norm_rope(q, k, cos, sin, *NONE, *HALF, run=run)
    expected = upstream(apply_rotary_pos_emb, q, k, cos, sin)
    assert result.dtype == torch.float32 and torch.equal(result, expected)


def multimodal(q, k, cos, sin, sections, alternating):
    """apply_multimodal_rotary_pos_emb of qwen-tts, written column by column."""
    half = cos.shape[-1] // 2
    ends = [sections[0], sections[0] + sections[1], half]
    chosen = []
    for table in (cos, sin):
        columns = []
        for column in range(2 * half):
            c = column % half
            if alternating:
                axis = c % 3 if c % 3 and c < 3 * sections[c % 3] else 0
                columns.append(table[axis, ..., c])
            else:
                axis = next(i for i, end in enumerate(ends) if c < end)
                columns.append(table[axis, ..., column])
        chosen.append(torch.stack(columns, dim=-1)[:, :, None])
    cos, sin = chosen

    def turn(x):
        rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + rotated * sin

    return torch.cat([turn(q), turn(k)], dim=2)


@pytest.mark.parametrize("alternating", [False, True])
@pytest.mark.parametrize("stride", [1, 3])
def test_multimodal_sections_take_their_axis(stride, alternating, device, run, poisoned_empty):
    """Tables of every ``stride``-th token of a longer table, so that a row's stride is not its length."""
    sections = (24, 20, 20)
    q, k, _, _ = case(rows=2, tokens=4, head_dim=128, device=device, dtype=torch.bfloat16)
    cos, sin = (t[:, :, ::stride][:, :, :4] for t in tables((3, 2, 12), 128, device, torch.bfloat16, start=5))
    result = qk_norm_rope(q, k, cos, sin, *NONE, "half", sections, alternating, False, run=run)
    expected = multimodal(q, k, cos, sin, sections, alternating)
    assert torch.equal(result, expected)
    assert torch.equal(reference(q, k, cos, sin, *NONE, "half", sections, alternating, False), expected)
    plain = reference(q, k, cos[0], sin[0], *NONE, *HALF)
    assert not torch.equal(expected, plain), "the axes do not differ: the test shows nothing"


@pytest.mark.parametrize(
    ("head_dim", "dtype", "order"),
    [
        *[(128, dtype, "cast_then_scale") for dtype in TYPES],
        *[(head_dim, torch.bfloat16, "cast_then_scale") for head_dim in (64, 72, 80, 96, 160)],
        (64, torch.float16, "one_plus"), (64, torch.float16, "scale_then_cast"), (64, torch.float16, "alpha"),
    ],
)  # fmt: skip
def test_norm_and_rope_in_the_same_precision(order, head_dim, dtype, device, run, same_precision, poisoned_empty):
    q, k, cos, sin = case(head_dim=head_dim, device=device, dtype=dtype)
    arguments = (q, k, cos, sin, *weights(head_dim, device, dtype), EPS, order, *HALF)
    result = qk_norm_rope(*arguments, run=run)
    same_precision(result, reference(*arguments), reference(*doubles(*arguments)))
    assert not TALLIES.of(run.receipt).fallbacks


def test_the_reference_with_norm_is_qwen3s(device):
    upstream_module = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    Qwen3RMSNorm, apply_rotary_pos_emb = upstream_module.Qwen3RMSNorm, upstream_module.apply_rotary_pos_emb

    q, k, cos, sin = case(head_dim=128, device=device, dtype=torch.bfloat16)
    q_weight, k_weight = weights(128, device, torch.bfloat16)
    norms = [Qwen3RMSNorm(128, eps=EPS).to(device) for _ in range(2)]
    for norm, weight in zip(norms, (q_weight, k_weight), strict=True):
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    expected = upstream(apply_rotary_pos_emb, norms[0](q), norms[1](k), cos, sin)
    assert torch.equal(reference(q, k, cos, sin, q_weight, k_weight, EPS, "cast_then_scale", *HALF), expected)


@pytest.mark.parametrize("layout", ["transposed", "packed projection", "one table for all rows", "every other element"])
def test_any_strides(layout, device, run):
    q, k, cos, sin = case(device=device)
    if layout == "transposed":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    elif layout == "packed projection":
        packed = torch.randn(2, 3, 8 * 64, device=device).unflatten(-1, (8, 64))
        q, k = packed[:, :, :4], packed[:, :, 4:6]
    elif layout == "every other element":
        q = torch.randn(2, 3, 4, 128, device=device)[..., ::2]
    else:
        cos, sin = (table[:1].expand(2, 3, 64) for table in (cos, sin))
    result = qk_norm_rope(q, k, cos, sin, *NONE, *HALF, run=run)
    assert torch.equal(result, reference(q, k, cos, sin, *NONE, *HALF))
    assert not TALLIES.of(run.receipt).fallbacks


def test_several_heads_a_program_give_the_same(device, run, monkeypatch):
    q, k, cos, sin = case(q_heads=7, kv_heads=3, head_dim=72, device=device)
    arguments = (q, k, cos, sin, *weights(72, device, torch.float32), EPS, "cast_then_scale", *HALF)
    alone = qk_norm_rope(*arguments, run=run)
    monkeypatch.setattr("voxfuse.kernels.qk_norm_rope.FEW_HEADS", 0)
    torch.testing.assert_close(qk_norm_rope(*arguments, run=run), alone, rtol=1e-6, atol=1e-6)


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
def test_zero_sizes_return_at_once(shape, device, run):
    q, k = torch.zeros(*shape, 4, 64, device=device), torch.zeros(*shape, 2, 64, device=device)
    cos = torch.zeros(*shape, 64, device=device)
    assert qk_norm_rope(q, k, cos, cos, *NONE, *HALF, run=run).shape == (*shape, 6, 64)


def test_envelope(device):
    q, k, cos, sin = case(device=device)
    why = qk_norm_rope.unsupported
    assert why(q, k, cos, sin, *NONE, *HALF) is None
    assert "float64" in why(q.double(), k.double(), cos, sin, *NONE, *HALF)
    assert "head_dim" in why(q, k[..., :32], cos, sin, *NONE, *HALF)
    assert "even width" in why(q, k, cos[..., :3], sin[..., :3], *NONE, *HALF)
    assert "2 rows × 3 tokens" in why(q, k, cos[:, :2], sin[:, :2], *NONE, *HALF)
    assert "together" in why(q, k, cos, sin, cos[0, 0], None, EPS, "cast_then_scale", *HALF)
    assert "norm weights" in why(q, k, cos, sin, cos[0, 0, :3], cos[0, 0], EPS, "cast_then_scale", *HALF)
    assert "add up to 32" in why(q, k, cos, sin, *NONE, "half", (1, 2, 3), False, False)
    assert "pairs must be" in why(q, k, cos, sin, *NONE, "thirds", (), False, False)
    cache, slots = torch.zeros(2, 2, 8, 64, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    cached = qk_norm_rope_cached.unsupported
    assert cached(q, k, k, cache, cache, slots, cos, sin, *NONE, *HALF) is None
    assert "caches must be" in cached(q, k, k, cache[:1], cache, slots, cos, sin, *NONE, *HALF)
    assert "slots must be" in cached(q, k, k, cache, cache, slots[:2], cos, sin, *NONE, *HALF)
    assert "v must be" in cached(q, k, k.half(), cache, cache, slots, cos, sin, *NONE, *HALF)
