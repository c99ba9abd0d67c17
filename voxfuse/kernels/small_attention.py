"""Attention of one new token over at most 32 keys in one launch: head norms, rotary embedding, cache write, attention.

What ``qk_norm_rope_cached`` and ``gqa_decode`` do in two launches or three, for the steps of a code predictor, which
sees the 16 codebooks of one frame (Qwen3-TTS, Qwen3-Omni) and is bound by its number of kernels.
Layouts: q [rows, 1, q_heads, head_dim], k and v [rows, 1, kv_heads, head_dim], any strides (views of a merged
projection); k_cache and v_cache [rows, kv_heads, cache_len, head_dim], unit inner stride, cache_len ≤ 32, written in
place; ``slots`` int64 or int32 [rows] or [rows, 1] on the device: how many tokens of each row the cache holds, which is
where the new one goes. It sees them and itself; what the cache holds behind is not read. cos, sin, norm weights and the
arguments up to ``wide`` as in ``qk_norm_rope``. The result is [rows, 1, q_heads, head_dim], contiguous.
A slot outside the cache is not written (the host cannot see it; the reference raises): at or behind the cache's end the
token sees all of the cache without itself, a negative one sees nothing and gives zero.
One program a (row, query head). Each turns the new key for itself, so that none waits for another's write.
Contract: same-precision, for the order of sums; scores stay in fp32, weights are rounded to the type as eager does.
Envelope: as ``qk_norm_rope_cached``, one token, at most 32 slots; inference only.
Source: Qwen3Attention of transformers; Qwen3TTSAttention of qwen-tts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxfuse.kernels import qk_norm_rope_cached as cached
from voxfuse.kernels import rmsnorm
from voxfuse.kernels._attention import attention
from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import exponential
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rotary import output_dtype, turned
from voxfuse.kernels._rounding import narrowed, target
from voxfuse.kernels._rows import power_of_two
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels.qk_norm_rope import Pairs

MAX_KEYS = 32
ELEMENTS_A_THREAD = 8  # of a cache's keys


@triton.jit
def _small_attention_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr,
    HQ, GROUP, CACHE,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kd, stride_vb, stride_vh, stride_vd,
    stride_axis, stride_cb, stride_cw,
    stride_kcb, stride_kch, stride_kcl, stride_vcb, stride_vch, stride_vcl, stride_sb,
    eps, inverse_d, scale,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, ORDER: tl.constexpr, PAIRS: tl.constexpr, SECTIONS: tl.constexpr,
    WIDE: tl.constexpr, TARGET: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // HQ).to(tl.int64)
    head = tl.program_id(0) % HQ
    kv_head = (head // GROUP).to(tl.int64)
    slot = tl.load(slots_ptr + b * stride_sb).to(tl.int64)
    l = tl.arange(0, BLOCK_L)[:, None]  # noqa: E741
    d = tl.arange(0, BLOCK_D)[None, :]
    held = (l < slot) & (l < CACHE) & (d < D)
    k_cache_ptr += b * stride_kcb + kv_head * stride_kch
    v_cache_ptr += b * stride_vcb + kv_head * stride_vch
    keys = tl.load(k_cache_ptr + l * stride_kcl + d, mask=held, other=0.0)  # [BLOCK_L, BLOCK_D]
    values = tl.load(v_cache_ptr + l * stride_vcl + d, mask=held, other=0.0)
    new_value = tl.load(v_ptr + b * stride_vb + kv_head * stride_vh + d * stride_vd, mask=d < D, other=0.0)
    like = tl.zeros([1, 1], y_ptr.dtype.element_ty)
    one = tl.zeros([1, 1], tl.int64)
    cos_ptr += b * stride_cb
    sin_ptr += b * stride_cb
    q = turned(
        q_ptr + b * stride_qb, q_weight_ptr, cos_ptr, sin_ptr, one + head, d, HQ, stride_qh, stride_qd, stride_axis,
        stride_cw, S0, S1, S2, eps, inverse_d, like, D, R, ORDER, PAIRS, SECTIONS, WIDE, TARGET,
    )  # fmt: skip
    new_key = turned(
        k_ptr + b * stride_kb, k_weight_ptr, cos_ptr, sin_ptr, one + kv_head, d, HQ, stride_kh, stride_kd, stride_axis,
        stride_cw, S0, S1, S2, eps, inverse_d, like, D, R, ORDER, PAIRS, SECTIONS, WIDE, TARGET,
    )  # fmt: skip
    writes = (head % GROUP == 0) & (slot >= 0) & (slot < CACHE) & (d < D)
    tl.store(k_cache_ptr + slot * stride_kcl + d, new_key, mask=writes)
    tl.store(v_cache_ptr + slot * stride_vcl + d, new_value, mask=writes)
    itself = l == slot
    keys = tl.where(itself, new_key, keys)
    values = tl.where(itself, new_value, values)
    scores = tl.sum(q.to(tl.float32) * keys.to(tl.float32), axis=1)[:, None] * scale  # [BLOCK_L, 1]
    seen = (l <= slot) & (l < CACHE)
    scores = tl.where(seen, scores, float("-inf"))
    highest = tl.max(scores, axis=0)[None, :]
    weights = exponential(scores - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, axis=0)[None, :]
    weights = narrowed(weights / tl.where(total == 0.0, 1.0, total), like, TARGET).to(tl.float32)
    y = tl.sum(weights * values.to(tl.float32), axis=0)[None, :]
    tl.store(y_ptr + tl.program_id(0).to(tl.int64) * D + d, narrowed(y, like, TARGET), mask=d < D)


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
    scale: float,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if q.dim() != 4 or q.shape[1] != 1 or k.dim() != 4 or k_cache.dim() != 4:
        return f"q must be [rows, 1, heads, head_dim], k and caches of four dimensions, got {tuple(q.shape)}"
    if k_cache.shape[2] > MAX_KEYS:
        return f"a cache of at most {MAX_KEYS} slots, got {k_cache.shape[2]}"
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        return f"heads do not match: q {tuple(q.shape)}, k {tuple(k.shape)}"
    if slots.dim() not in (1, 2) or slots.numel() != q.shape[0]:
        return f"slots must be [{q.shape[0]}] or [{q.shape[0]}, 1], got {tuple(slots.shape)}"
    rope = (cos, sin, q_weight, k_weight, eps, order, pairs, sections, alternating, wide)
    reason: str | None = cached.unsupported(q, k, v, k_cache, v_cache, slots.view(-1, 1), *rope)
    return reason


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
    scale: float,
) -> torch.Tensor:
    """The upstream chain: turn, write to the cache, attend over what it holds then."""
    rope = (cos, sin, q_weight, k_weight, eps, order, pairs, sections, alternating, wide)
    query = cached.reference(q, k, v, k_cache, v_cache, slots.view(-1, 1), *rope)
    return attention(query.transpose(1, 2), k_cache, v_cache, slots.view(-1) + 1, None, scale, False, 0)


def _fake(q: torch.Tensor, *others: object) -> torch.Tensor:
    cos, wide = others[5], others[14]
    return q.new_empty(q.shape, dtype=output_dtype(q, cos, wide))  # type: ignore[arg-type]


@fused_op(
    "small_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor cos, Tensor sin,"
    " Tensor? q_weight, Tensor? k_weight, float eps, str order, str pairs, int[] sections, bool alternating, bool wide,"
    " float scale) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def small_attention(
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
    pairs: Pairs,
    sections: Sequence[int],
    alternating: bool,
    wide: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of the new token, [rows, 1, q_heads, head_dim]; its key and value go to their slots of the caches."""
    rows, _, q_heads, head_dim = q.shape
    y = torch.empty(q.shape, dtype=output_dtype(q, cos, wide), device=q.device)
    if y.numel() == 0:
        return y
    capacity, strides = k_cache.shape[2], cos.stride()
    block_l, block_d = max(2, power_of_two(capacity)), power_of_two(head_dim)
    launch(
        _small_attention_kernel,
        rows * q_heads,
        (q, k, v, y, k_cache, v_cache, slots, q_weight, k_weight, cos, sin),
        (
            q_heads, q_heads // k.shape[2], capacity,
            *(step for x in (q, k, v) for step in (x.stride(0), x.stride(2), x.stride(3))),
            strides[0] if sections else 0, strides[-3] if cos.dim() > 2 and cos.shape[-3] > 1 else 0, strides[-1],
            *k_cache.stride()[:3], *v_cache.stride()[:3], slots.stride(0),
        ),
        (eps, 1.0 / head_dim, scale),
        (
            *(tuple(sections) or (0, 0, 0)), head_dim, cos.shape[-1], order, pairs,
            "none" if not sections else "alternating" if alternating else "runs", wide, target(), block_l, block_d,
        ),
        launch_options(block_l * block_d),
    )  # fmt: skip
    return y


def launch_options(elements: int) -> tuple[tuple[str, int], ...]:
    """Warps by the elements of a cache's keys."""
    warps = (("num_warps", min(max(elements // (32 * ELEMENTS_A_THREAD), 1), 8)),)
    return (*warps, ("enable_fp_fusion", False)) if target() == "hip" else warps
