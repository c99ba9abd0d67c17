"""Rotary embedding in plain torch, as upstream writes it (which column an element turns by, and the turn itself), and
the part of a kernel that norms and turns heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxfuse.kernels._rounding import add_rn, mul_rn, narrowed
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels.rmsnorm import scaled

AXES = 3  # of multimodal rope: time, height, width


def columns(table: torch.Tensor, pairs: str, sections: Sequence[int], alternating: bool) -> torch.Tensor:
    """cos or sin as the elements of a head need it, [rows, tokens, 1, R]."""
    if sections and alternating:  # apply_multimodal_rotary_pos_emb of qwen-tts
        half = table[..., : table.shape[-1] // 2]
        chosen = half[0].clone()
        for axis in range(1, AXES):
            end = sections[axis] * AXES
            chosen[..., axis:end:AXES] = half[axis, ..., axis:end:AXES]
        table = torch.cat([chosen, chosen], dim=-1)
    elif sections:
        chunks = table.split([*sections, *sections], dim=-1)
        table = torch.cat([chunk[i % AXES] for i, chunk in enumerate(chunks)], dim=-1)
    if pairs == "interleaved":
        table = table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)
    return table.unsqueeze(-2)


def _rotated(x: torch.Tensor, pairs: str) -> torch.Tensor:
    if pairs == "half":
        middle = x.shape[-1] // 2
        return torch.cat((-x[..., middle:], x[..., :middle]), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairs: str, wide: bool) -> torch.Tensor:
    dtype = x.dtype
    if wide:
        type_ = torch.promote_types(dtype, torch.float32)
        x, cos, sin = x.to(type_), cos.to(type_), sin.to(type_)
    turning, passing = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    y = torch.cat([turning * cos + _rotated(turning, pairs) * sin, passing], dim=-1)
    return y.to(dtype) if wide else y


def output_dtype(q: torch.Tensor, cos: torch.Tensor, wide: bool) -> torch.dtype:
    """The type that the upstream chain gives."""
    return q.dtype if wide or cos.dtype == q.dtype else torch.promote_types(q.dtype, cos.dtype)


@triton.jit
def _axis_offset(column, stride_axis, S0, S1, S2, ALTERNATING: tl.constexpr):
    """Offset of the axis that a column of the first half takes its angle from."""
    if ALTERNATING:
        axis = column % 3
        axis = tl.where(((axis == 1) & (column < S1 * 3)) | ((axis == 2) & (column < S2 * 3)), axis, 0)
    else:
        axis = (column >= S0).to(tl.int32) + (column >= S0 + S1).to(tl.int32)
    return axis * stride_axis


@triton.jit
def turned(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, h, d, H, stride_xh, stride_xd, stride_axis, stride_cw,
    S0, S1, S2, eps, inverse_d, result,
    D: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr, PAIRS: tl.constexpr, SECTIONS: tl.constexpr,
    WIDE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The heads h [., 1] of one token, normed and turned, elements d [1, .], in the type of ``result``; x_ptr points to
    head 0."""
    turns = d < R
    if PAIRS == "half":
        partner = tl.where(d < R // 2, d + R // 2, d - R // 2)
        negative = d < R // 2
        column = d
    else:
        partner = d ^ 1
        negative = (d % 2) == 0
        column = d // 2 if PAIRS == "interleaved" else d
    mask = (h < H) & (d < D)
    source = x_ptr + h * stride_xh
    x = tl.load(source + d * stride_xd, mask=mask, other=0.0)  # [BLOCK_H, BLOCK_D]
    other = tl.load(source + partner * stride_xd, mask=(h < H) & turns, other=0.0)
    narrow = tl.zeros([1, 1], x_ptr.dtype.element_ty)
    x, other = x.to(tl.float32), other.to(tl.float32)
    if weight_ptr is not None:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * inverse_d + eps)[:, None]
        weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32) + tl.zeros_like(x)
        weight_other = tl.load(weight_ptr + partner, mask=turns, other=0.0).to(tl.float32) + tl.zeros_like(x)
        x = narrowed(scaled(x, weight, rstd, narrow, ORDER, TARGET), narrow, TARGET).to(tl.float32)
        other = narrowed(scaled(other, weight_other, rstd, narrow, ORDER, TARGET), narrow, TARGET).to(tl.float32)
    offset = column * stride_cw
    if SECTIONS != "none":
        half = tl.where(d < R // 2, d, d - R // 2)
        if SECTIONS == "alternating":
            offset = half * stride_cw
        offset += _axis_offset(half, stride_axis, S0, S1, S2, SECTIONS == "alternating")
    cos = tl.load(cos_ptr + offset, mask=turns, other=0.0).to(tl.float32) + tl.zeros_like(x)
    sin = tl.load(sin_ptr + offset, mask=turns, other=0.0).to(tl.float32) + tl.zeros_like(x)
    straight = mul_rn(x, cos, TARGET)
    across = mul_rn(tl.where(negative, -other, other), sin, TARGET)
    if not WIDE:
        straight = narrowed(straight, result, TARGET).to(tl.float32)
        across = narrowed(across, result, TARGET).to(tl.float32)
    y = tl.where(turns, add_rn(straight, across, TARGET), x)
    return narrowed(y, result, TARGET)
