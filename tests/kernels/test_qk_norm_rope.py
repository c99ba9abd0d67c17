"""Rotary embedding with and without the heads' norm, against the upstream functions."""

import pytest
import torch
from rope_cases import EPS, HALF, NONE, TYPES, case, tables, weights

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.qk_norm_rope import qk_norm_rope, reference, split_heads


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
