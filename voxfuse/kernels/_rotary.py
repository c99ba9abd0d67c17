"""Rotary embedding in plain torch, as upstream writes it: which column an element turns by, and the turn itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
