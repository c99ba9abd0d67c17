"""Rotary embedding of queries and keys in one launch, with RMSNorm of every head before it where the model has one.

Layouts: q [rows, tokens, q_heads, head_dim], k [rows, tokens, kv_heads, head_dim], any strides. cos and sin as
upstream makes them: [tokens, width], [rows or 1, tokens, width], or [3, rows or 1, tokens, width] with ``sections``.
y = x · cos + rotated(x) · sin over the first R elements of a head, the others pass (partial rotary). ``pairs``:
- "half": elements i and i + R/2 turn together, element i with column i; R = width. Llama, Qwen.
- "interleaved": 2i and 2i + 1, both with column i; R = width, of which the first half is read. GLM, GPT-J.
- "interleaved_columns": 2i and 2i + 1, each with the column of its own number; R = width. CosyVoice's DiT.
``sections`` (three numbers that add up to R/2; only with "half") is multimodal rope: column c takes the axis (of 3)
that c mod R/2 falls into, in runs, or alternating with ``alternating`` (Qwen3-TTS: c mod 3, up to 3 · sections[axis]).
``wide`` computes in fp32 and rounds once, as the vision towers do; otherwise each product and the sum round to the
promoted type of q and cos, as eager does. Norm: ``order`` of ``rmsnorm``, weights [head_dim] of q's type, or None.
The result is one tensor [rows, tokens, q_heads + kv_heads, head_dim], keys behind queries: ``split_heads`` takes it
apart. The kernel can write keys and values into a cache instead: ``qk_norm_rope_cached``.
Contract: bitwise without norm; with it same-precision, for the order of the sum of squares alone.
Envelope: fp32, fp16 or bf16, q and k of one type, even R ≤ head_dim ≤ 1024; inference only.
Source: apply_rotary_pos_emb, Qwen3Attention of transformers; apply_multimodal_rotary_pos_emb of qwen-tts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from voxfuse.kernels import rmsnorm
from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rotary import AXES, columns, output_dtype, turn, turned
from voxfuse.kernels._rounding import target
from voxfuse.kernels._rows import power_of_two
from voxfuse.kernels._triton import tl, triton

Pairs = Literal["half", "interleaved", "interleaved_columns"]
PAIRS = ("half", "interleaved", "interleaved_columns")
MAX_HEAD_DIM = 1024
FEW_HEADS = 4096  # up to so many (token, head) pairs each has a program of its own
HEADS_A_PROGRAM = 4
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _heads(
    x_ptr, y_ptr, weight_ptr, cos_ptr, sin_ptr,
    first, H, stride_xh, stride_xd, stride_yh, stride_axis, stride_cw,
    S0, S1, S2, eps, inverse_d,
    D: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr, PAIRS: tl.constexpr, SECTIONS: tl.constexpr,
    WIDE: tl.constexpr, TARGET: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of BLOCK_H heads of one token; x_ptr and y_ptr point to its head 0."""
    h = first + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    result = tl.zeros([1, 1], y_ptr.dtype.element_ty)
    y = turned(
        x_ptr, weight_ptr, cos_ptr, sin_ptr, h, d, H, stride_xh, stride_xd, stride_axis, stride_cw,
        S0, S1, S2, eps, inverse_d, result, D, R, ORDER, PAIRS, SECTIONS, WIDE, TARGET,
    )  # fmt: skip
    tl.store(y_ptr + h * stride_yh + d, y, mask=(h < H) & (d < D))


@triton.jit
def _qk_norm_rope_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    T, HQ, HK, QB, BLOCKS, CACHE,
    stride_qb, stride_qt, stride_qh, stride_qd, stride_kb, stride_kt, stride_kh, stride_kd,
    stride_vb, stride_vt, stride_vh, stride_vd, stride_yt,
    stride_axis, stride_cb, stride_ct, stride_cw,
    stride_kcb, stride_kch, stride_kcl, stride_vcb, stride_vch, stride_vcl, stride_sb, stride_st,
    eps, inverse_d,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr, PAIRS: tl.constexpr, SECTIONS: tl.constexpr,
    WIDE: tl.constexpr, TARGET: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a (row, token, BLOCK_H heads): queries first, then keys (and the values of the same heads)."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    b, t = token // T, token % T
    cos_ptr += b * stride_cb + t * stride_ct
    sin_ptr += b * stride_cb + t * stride_ct
    y_ptr += token * stride_yt
    if block < QB:
        _heads(
            q_ptr + b * stride_qb + t * stride_qt, y_ptr, q_weight_ptr, cos_ptr, sin_ptr,
            block * BLOCK_H, HQ, stride_qh, stride_qd, D, stride_axis, stride_cw,
            S0, S1, S2, eps, inverse_d, D, R, ORDER, PAIRS, SECTIONS, WIDE, TARGET, BLOCK_H, BLOCK_D,
        )  # fmt: skip
    else:
        first = (block - QB) * BLOCK_H
        k_ptr += b * stride_kb + t * stride_kt
        if k_cache_ptr is None:
            out_ptr, stride_out, kept = y_ptr + HQ * D, D, HK
        else:
            slot = tl.load(slots_ptr + b * stride_sb + t * stride_st).to(tl.int64)
            out_ptr, stride_out = k_cache_ptr + b * stride_kcb + slot * stride_kcl, stride_kch
            kept = tl.where((slot >= 0) & (slot < CACHE), HK, 0)
            h, d = first + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
            mask = (h < kept) & (d < D)
            v_ptr += b * stride_vb + t * stride_vt
            v = tl.load(v_ptr + h * stride_vh + d * stride_vd, mask=mask, other=0.0)  # [BLOCK_H, BLOCK_D]
            tl.store(v_cache_ptr + b * stride_vcb + slot * stride_vcl + h * stride_vch + d, v, mask=mask)
        _heads(
            k_ptr, out_ptr, k_weight_ptr, cos_ptr, sin_ptr,
            first, kept, stride_kh, stride_kd, stride_out, stride_axis, stride_cw,
            S0, S1, S2, eps, inverse_d, D, R, ORDER, PAIRS, SECTIONS, WIDE, TARGET, BLOCK_H, BLOCK_D,
        )  # fmt: skip


def split_heads(packed: torch.Tensor, q_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of the result as upstream hands them on: views [rows, heads, tokens, head_dim]."""
    heads_first = packed.transpose(1, 2)
    return heads_first[:, :q_heads], heads_first[:, q_heads:]


def unsupported(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    order: str,
    pairs: str,
    sections: Sequence[int],
    alternating: bool,
    wide: bool,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return f"q and k must be [rows, tokens, heads, head_dim], got {tuple(q.shape)} and {tuple(k.shape)}"
    rows, tokens, _, head_dim = q.shape
    if q.dtype not in FLOAT_TYPES or k.dtype != q.dtype or cos.dtype not in FLOAT_TYPES or sin.dtype != cos.dtype:
        return f"expected fp32, fp16 or bf16, q as k and cos as sin, got {q.dtype} {k.dtype} {cos.dtype} {sin.dtype}"
    if pairs not in PAIRS or order not in rmsnorm.ORDERS:
        return f"pairs must be one of {PAIRS} and order of {rmsnorm.ORDERS}, got {pairs!r} and {order!r}"
    width = cos.shape[-1]
    if not 2 <= width <= head_dim <= MAX_HEAD_DIM or width % 2:
        return f"cos must have an even width up to head_dim {head_dim} (at most {MAX_HEAD_DIM}), got {width}"
    if sections and (len(sections) != AXES or 2 * sum(sections) != width or pairs != "half"):
        return f"sections must be {AXES} numbers that add up to {width // 2}, with pairs 'half', got {list(sections)}"
    lead = cos.shape[:-1]
    allowed = {(AXES, rows, tokens), (AXES, 1, tokens)} if sections else {(tokens,), (1, tokens), (rows, tokens)}
    if tuple(lead) not in allowed or sin.shape != cos.shape or sin.stride() != cos.stride():
        return (
            f"cos and sin must be alike, for {rows} rows × {tokens} tokens, got {tuple(cos.shape)} {tuple(sin.shape)}"
        )
    if (q_weight is None) != (k_weight is None):
        return "q_weight and k_weight must be given together"
    for weight in (q_weight, k_weight):
        if weight is not None and (
            weight.shape != (head_dim,) or weight.dtype != q.dtype or not weight.is_contiguous()
        ):
            return f"norm weights must be contiguous {q.dtype} [{head_dim}], got {weight.dtype} {tuple(weight.shape)}"
    return None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    order: str,
    pairs: str,
    sections: Sequence[int],
    alternating: bool,
    wide: bool,
) -> torch.Tensor:
    """The upstream chain, queries and keys joined; fp64 inputs stay fp64."""
    if q_weight is not None and k_weight is not None:
        q, k = rmsnorm.reference(q, q_weight, eps, order), rmsnorm.reference(k, k_weight, eps, order)
    cos, sin = (columns(table, pairs, sections, alternating) for table in (cos, sin))
    return torch.cat([turn(q, cos, sin, pairs, wide), turn(k, cos, sin, pairs, wide)], dim=2)


def run_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    y: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    rope: tuple[str, str, Sequence[int], bool, bool],
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Launch over every head; ``rope`` is (order, pairs, sections, alternating, wide), ``cache`` (v, k_cache, v_cache,
    slots). y [rows, tokens, heads, head_dim] is contiguous."""
    rows, tokens, q_heads, head_dim = q.shape
    kv_heads, strides = k.shape[2], cos.stride()
    order, pairs, sections, alternating, wide = rope
    block_h = 1 if rows * tokens * (q_heads + kv_heads) <= FEW_HEADS else HEADS_A_PROGRAM
    q_blocks = -(-q_heads // block_h)
    blocks = q_blocks + -(-kv_heads // block_h)
    axis = strides[0] if sections else 0
    row = strides[-3] if cos.dim() > 2 and cos.shape[-3] > 1 else 0
    v = k_cache = v_cache = slots = None
    v_strides: tuple[int, ...] = (0,) * 4
    cached: tuple[int, ...] = (0,) * 8
    if cache is not None:
        v, k_cache, v_cache, slots = cache
        v_strides = v.stride()
        slot_strides = slots.stride() if slots.dim() == 2 else (0, slots.stride(0))
        cached = (*k_cache.stride()[:3], *v_cache.stride()[:3], *slot_strides)
    kind = "none" if not sections else "alternating" if alternating else "runs"
    options = (("num_warps", 1), ("enable_fp_fusion", False)) if target() == "hip" else (("num_warps", 1),)
    launch(
        _qk_norm_rope_kernel,
        rows * tokens * blocks,
        (q, k, v, y, k_cache, v_cache, slots, q_weight, k_weight, cos, sin),
        (
            tokens, q_heads, kv_heads, q_blocks, blocks, 0 if k_cache is None else k_cache.shape[2],
            *q.stride(), *k.stride(), *v_strides, y.shape[2] * head_dim,
            axis, row, strides[-2], strides[-1], *cached,
        ),
        (eps, 1.0 / head_dim),
        (
            *(tuple(sections) or (0, 0, 0)), head_dim, cos.shape[-1], order, pairs, kind, wide, target(),
            block_h, power_of_two(head_dim),
        ),
        options,
    )  # fmt: skip


@fused_op(
    "qk_norm_rope",
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, str order, str pairs,"
    " int[] sections, bool alternating, bool wide) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda q, k, cos, sin, q_weight, k_weight, eps, order, pairs, sections, alternating, wide: q.new_empty(
        (*q.shape[:2], q.shape[2] + k.shape[2], q.shape[3]), dtype=output_dtype(q, cos, wide)
    ),
)
def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    order: rmsnorm.Order,
    pairs: Pairs,
    sections: Sequence[int],
    alternating: bool,
    wide: bool,
) -> torch.Tensor:
    """Turned queries and keys [rows, tokens, q_heads + kv_heads, head_dim]; formula in the module's docstring."""
    rows, tokens, q_heads, head_dim = q.shape
    y = torch.empty((rows, tokens, q_heads + k.shape[2], head_dim), dtype=output_dtype(q, cos, wide), device=q.device)
    if y.numel():
        run_kernel(q, k, y, cos, sin, q_weight, k_weight, eps, (order, pairs, sections, alternating, wide))
    return y
