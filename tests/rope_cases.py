"""Heads, tables of a rotary embedding and norm weights for tests of qk_norm_rope and qk_norm_rope_cached."""

import torch

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
