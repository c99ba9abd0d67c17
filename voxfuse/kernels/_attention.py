"""Attention over a cache in plain torch, as transformers' eager chain computes it: the reference of decode kernels."""

from __future__ import annotations

import torch


def visible(q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor | None, causal: bool, window: int) -> torch.Tensor:
    """Which keys each token may see by position alone, bool [rows or 1, 1, tokens, cache_len]."""
    tokens, capacity = q.shape[2], k.shape[2]
    key = torch.arange(capacity, device=q.device)
    length = torch.full((1,), capacity, device=q.device) if lengths is None else lengths.clamp(0, capacity)
    length = length.view(-1, 1, 1, 1)
    position = length - tokens + torch.arange(tokens, device=q.device).view(-1, 1)
    seen = (key < length).expand(-1, 1, tokens, capacity)
    if causal:
        seen = seen & (key <= position)
    return seen & (key > position - window) if window > 0 else seen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """The upstream chain with repeated keys and values, [rows, tokens, q_heads, head_dim]; fp64 inputs stay fp64."""
    seen = visible(q, k, lengths, causal, window)
    if lengths is not None:  # hidden values may be NaN, and zero times NaN is not zero
        inside = (torch.arange(k.shape[2], device=k.device) < lengths.view(-1, 1, 1, 1)).transpose(2, 3)
        k, v = torch.where(inside, k, 0), torch.where(inside, v, 0)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    weights = torch.where(
        (scores > -torch.inf).any(-1, keepdim=True) | scores.isnan().any(-1, keepdim=True), weights, 0
    )
    return torch.matmul(weights, v).transpose(1, 2).contiguous()
