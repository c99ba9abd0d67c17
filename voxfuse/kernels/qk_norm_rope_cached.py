"""``qk_norm_rope`` that writes the new keys, and the values, into a cache: one launch before a decode step's attention.

Layouts: as in ``qk_norm_rope``; v [rows, tokens, kv_heads, head_dim], any strides; k_cache and v_cache [rows, kv_heads,
cache_len, head_dim], unit inner stride, written in place; ``slots`` int64 or int32 [tokens] or [rows, tokens] on the
device: where in the cache each token goes. The result is the queries [rows, tokens, q_heads, head_dim].
A slot outside the cache is not written (the host cannot see it; the reference raises). Two tokens of a row with one
slot: either may win.
Contract: as ``qk_norm_rope``; values are copied.
Envelope: as ``qk_norm_rope``; v and caches of the type that the keys come out with.
Source: the update of a static KV cache in transformers (StaticLayer.update).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxfuse.kernels import qk_norm_rope as plain
from voxfuse.kernels import rmsnorm
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rotary import output_dtype


def unsupported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
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
    reason = plain.unsupported(q, k, cos, sin, q_weight, k_weight, eps, order, pairs, sections, alternating, wide)
    if reason is not None:
        return reason
    dtype = output_dtype(q, cos, wide)
    if v.shape != k.shape or any(tensor.dtype != dtype for tensor in (v, k_cache, v_cache)):
        kinds = f"{v.dtype} {k_cache.dtype} {v_cache.dtype}"
        return f"v must be as k {tuple(k.shape)}, and v and caches {dtype}, got {tuple(v.shape)}, {kinds}"
    rows, tokens, kv_heads, head_dim = k.shape
    for cache in (k_cache, v_cache):
        if cache.dim() != 4 or (*cache.shape[:2], cache.shape[3]) != (rows, kv_heads, head_dim) or cache.stride(3) != 1:
            return (
                f"caches must be [{rows}, {kv_heads}, cache_len, {head_dim}] with unit inner stride, got "
                f"{tuple(cache.shape)} {cache.stride()}"
            )
    if k_cache.shape != v_cache.shape:
        return f"caches must be of one length, got {k_cache.shape[2]} and {v_cache.shape[2]}"
    if tuple(slots.shape) not in {(tokens,), (rows, tokens)} or slots.dtype not in (torch.int32, torch.int64):
        return f"slots must be int32 or int64 [{tokens}] or [{rows}, {tokens}], got {slots.dtype} {tuple(slots.shape)}"
    return None


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
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
    """The upstream chain: turn, then write keys and values to their slots."""
    y = plain.reference(q, k, cos, sin, q_weight, k_weight, eps, order, pairs, sections, alternating, wide)
    q_heads = q.shape[2]
    rows = torch.arange(q.shape[0], device=q.device)[:, None]
    where = slots.to(torch.int64).expand(q.shape[:2])
    k_cache.transpose(1, 2)[rows, where] = y[:, :, q_heads:]
    v_cache.transpose(1, 2)[rows, where] = v
    return y[:, :, :q_heads].contiguous()


def _fake(q: torch.Tensor, k: torch.Tensor, *others: object) -> torch.Tensor:
    cos, wide = others[4], others[-1]
    return q.new_empty(q.shape, dtype=output_dtype(q, cos, wide))  # type: ignore[arg-type]


@fused_op(
    "qk_norm_rope_cached",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor cos, Tensor sin,"
    " Tensor? q_weight, Tensor? k_weight, float eps, str order, str pairs, int[] sections, bool alternating, bool wide)"
    " -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def qk_norm_rope_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    order: rmsnorm.Order,
    pairs: plain.Pairs,
    sections: Sequence[int],
    alternating: bool,
    wide: bool,
) -> torch.Tensor:
    """Turned queries [rows, tokens, q_heads, head_dim]; keys and values go to their slots of the caches."""
    y = torch.empty(q.shape, dtype=output_dtype(q, cos, wide), device=q.device)
    if y.numel():
        rope = (order, pairs, sections, alternating, wide)
        plain.run_kernel(q, k, y, cos, sin, q_weight, k_weight, eps, rope, (v, k_cache, v_cache, slots))
    return y
