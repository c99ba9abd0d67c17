"""Attention of a few new tokens over a KV cache, with each key and value read once for all query heads that share it.

Layouts: q [rows, q_heads, tokens, head_dim], k and v [rows, kv_heads, cache_len, head_dim], strides with unit inner
stride; y [rows, tokens, q_heads, head_dim], contiguous, as transformers' attention interface hands it on. Query heads
h · group … belong to kv head h. ``lengths`` int32 or int64 [rows] on the device: valid keys of each row, the new tokens
included (None: all of the cache); what the cache holds behind them is not read. Token t of a row sits at position
length − tokens + t. ``causal``: it sees no key behind its position; ``window`` > 0: only that many keys up to its
position. ``mask`` [rows or 1, q_heads or 1, tokens or 1, cache_len]: boolean (False hides) or additive.
softmax(q · kᵀ · scale + mask) · v; a token that sees no key gives zero.
The grid follows from the cache's size, never from lengths: one captured graph serves every length. A row's visible
keys are shared out evenly over the splits of the grid; those left without any exit at once, and a second kernel merges
the partial sums (flash decoding).
Contract: same-precision. Scores and sums in fp32; weights rounded to v's type before the product with v, as eager does,
but before their normalisation.
Envelope: fp32, fp16 or bf16 of one type, head_dim ≤ 256, tokens ≤ 16, tokens · group ≤ 128; inference only.
Source: eager_attention_forward and repeat_kv of transformers; grouped-query attention, arXiv:2305.13245.
"""

from __future__ import annotations

import functools

import torch

from voxfuse.kernels._attention import attention as reference
from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import exponential
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rounding import narrowed, target
from voxfuse.kernels._rows import power_of_two
from voxfuse.kernels._triton import tl, triton

MAX_HEAD_DIM = 256
MAX_TOKENS = 16
MAX_QUERIES = 128  # tokens · group
LEAST_QUERIES = 16  # what tl.dot needs
FEW_QUERIES, WIDE_HEAD_DIM = 32, 128  # where blocks get smaller, for the registers' sake
MAX_SPLITS = 64
PROGRAMS_A_PROCESSOR = 2
HOST_PROCESSORS = 4  # in the interpreter
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _product(a, b, TARGET: tl.constexpr):
    """a · bᵀ in fp32.

    Of fp32 inputs by fp32 products (three TF32 ones leave twice the eager chain's error), pairwise down to sums of
    sixteen: a GPU adds up a row one by one, which over a head_dim of 64 alone leaves as much.
    The interpreter has no product of half types: it takes fp64.
    """
    if a.dtype == tl.float32 and a.shape[1] > 16:
        a_even, a_odd = tl.split(tl.reshape(a, [a.shape[0], a.shape[1] // 2, 2]))
        b_even, b_odd = tl.split(tl.reshape(b, [b.shape[0], b.shape[1] // 2, 2]))
        c = _product(a_even, b_even, TARGET) + _product(a_odd, b_odd, TARGET)
    elif TARGET == "interpreter" and a.dtype != tl.float32:
        c = tl.dot(a.to(tl.float64), tl.trans(b).to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    else:
        c = tl.dot(a, tl.trans(b), input_precision="ieee")
    return c


@triton.jit
def _scores(q, k, TARGET: tl.constexpr):
    """q · kᵀ in fp32, whose rounding makes most of the result's error with fp32 inputs: these in sums of eight where
    registers allow. tl.dot takes no fewer than sixteen, so half of them are zeros."""
    if q.dtype == tl.float32 and q.shape[0] * q.shape[1] <= 1024:
        low = tl.arange(0, q.shape[1])[None, :] < q.shape[1] // 2
        scores = _product(tl.where(low, q, 0.0), k, TARGET) + _product(tl.where(low, 0.0, q), k, TARGET)
    else:
        scores = _product(q, k, TARGET)
    return scores


@triton.jit
def _split_kernel(
    q_ptr, k_ptr, v_ptr, y_ptr, lengths_ptr, mask_ptr, sums_ptr,
    T, HK, G, L, SPLITS, STATISTICS,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kl, stride_vb, stride_vh, stride_vl,
    stride_mb, stride_mh, stride_mt, stride_ml,
    scale,
    D: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, BOOLEAN: tl.constexpr, TARGET: tl.constexpr,
    ALONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a (row, kv head, split): its share of the keys for all tokens and heads of the group."""
    split = tl.program_id(0) % SPLITS
    kv_head = (tl.program_id(0) // SPLITS % HK).to(tl.int64)
    b = (tl.program_id(0) // SPLITS // HK).to(tl.int64)
    length = L
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), L).to(tl.int32)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - T - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(length - lowest, BLOCK_N), SPLITS) * BLOCK_N
    first = lowest + split * share
    end = tl.minimum(first + share, length)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    t = m % T
    head = kv_head * G + m // T
    real = m < G * T
    position = length - T + t  # [BLOCK_M]
    q = tl.load(
        q_ptr + b * stride_qb + head[:, None] * stride_qh + t[:, None] * stride_qt + d[None, :],
        mask=real[:, None] & (d[None, :] < D), other=0.0,
    )  # [BLOCK_M, BLOCK_D]  # fmt: skip
    k_ptr += b * stride_kb + kv_head * stride_kh
    v_ptr += b * stride_vb + kv_head * stride_vh
    if mask_ptr is not None:
        mask_ptr += b * stride_mb
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < end) & (d[None, :] < D)
        k = tl.load(k_ptr + n[:, None].to(tl.int64) * stride_kl + d[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + n[:, None].to(tl.int64) * stride_vl + d[None, :], mask=inside, other=0.0)
        scores = _scores(q, k, TARGET) * scale  # [BLOCK_M, BLOCK_N]
        seen = real[:, None] & (n[None, :] < end)
        if CAUSAL:
            seen = seen & (n[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > position[:, None] - WINDOW)
        if mask_ptr is not None:
            where = head[:, None] * stride_mh + t[:, None] * stride_mt + n[None, :].to(tl.int64) * stride_ml
            given = tl.load(mask_ptr + where, mask=seen, other=0)
            if BOOLEAN:
                seen = seen & (given != 0)
            else:
                scores += given.to(tl.float32)
        scores = tl.where(seen, scores, float("-inf"))
        risen = tl.maximum(highest, tl.max(scores, axis=1))
        anchor = tl.where(risen == float("-inf"), 0.0, risen)
        weights = exponential(scores - anchor[:, None])
        shrink = exponential(highest - anchor)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + _product(narrowed(weights, v, TARGET), tl.trans(v), TARGET)
        highest = risen

    row = (b * T + t) * HK * G + head
    if ALONE:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        result = narrowed(sums, tl.zeros([1, 1], y_ptr.dtype.element_ty), TARGET)
        tl.store(y_ptr + row[:, None] * D + d[None, :], result, mask=real[:, None] & (d[None, :] < D))
    else:
        part = row * SPLITS + split
        tl.store(sums_ptr + STATISTICS + part * 2, highest, mask=real)
        tl.store(sums_ptr + STATISTICS + part * 2 + 1, total, mask=real)
        some = real & (first < end)
        tl.store(sums_ptr + part[:, None] * D + d[None, :], sums, mask=some[:, None] & (d[None, :] < D))


@triton.jit
def _merge_kernel(
    sums_ptr, y_ptr, SPLITS, STATISTICS,
    D: tl.constexpr, TARGET: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a (row, token, query head): its partial sums, weighed by their maxima."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    part = row * SPLITS + s
    highest = tl.load(sums_ptr + STATISTICS + part * 2, mask=s < SPLITS, other=float("-inf"))
    total = tl.load(sums_ptr + STATISTICS + part * 2 + 1, mask=s < SPLITS, other=0.0)
    some = total > 0.0  # the sums of a split without keys were never written
    anchor = tl.max(highest, axis=0)
    weights = tl.where(some, exponential(highest - tl.where(anchor == float("-inf"), 0.0, anchor)), 0.0)
    sums = tl.load(sums_ptr + part[:, None] * D + d[None, :], mask=some[:, None] & (d[None, :] < D), other=0.0)
    whole = tl.sum(weights * total, axis=0)
    y = tl.sum(weights[:, None] * sums, axis=0) / tl.where(whole == 0.0, 1.0, whole)
    y = tl.where(whole != whole, whole, y)  # NaN in a split that counted as empty stays visible
    tl.store(y_ptr + row * D + d, narrowed(y, tl.zeros([1], y_ptr.dtype.element_ty), TARGET), mask=d < D)


def unsupported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if any(tensor.dim() != 4 for tensor in (q, k, v)) or k.shape != v.shape:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        return f"q, k and v must be [rows, heads, tokens, head_dim], k and v alike, got {shapes}"
    rows, q_heads, tokens, head_dim = q.shape
    if k.shape[0] != rows or k.shape[3] != head_dim or q_heads % max(k.shape[1], 1):
        return f"heads or rows do not match: q {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.dtype not in FLOAT_TYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must be of one type, fp32, fp16 or bf16, got {q.dtype}, {k.dtype}, {v.dtype}"
    group = q_heads // max(k.shape[1], 1)
    if head_dim > MAX_HEAD_DIM or tokens > MAX_TOKENS or tokens * group > MAX_QUERIES:
        return (
            f"at most head_dim {MAX_HEAD_DIM}, {MAX_TOKENS} tokens and {MAX_QUERIES} tokens · group, got {head_dim}, "
            f"{tokens} and {tokens * group}"
        )
    if any(tensor.stride(3) != 1 for tensor in (q, k, v)):
        return f"head_dim must have unit stride, got {q.stride()}, {k.stride()}, {v.stride()}"
    if lengths is not None and (
        lengths.shape != (rows,) or not lengths.is_contiguous() or lengths.dtype not in (torch.int32, torch.int64)
    ):
        return f"lengths must be contiguous int32 or int64 [{rows}], got {lengths.dtype} {tuple(lengths.shape)}"
    if mask is not None:
        full = (rows, q_heads, tokens, k.shape[2])
        fits = mask.dim() == 4 and all(size in (1, whole) for size, whole in zip(mask.shape[:3], full[:3], strict=True))
        if not fits or mask.shape[3] != full[3] or mask.dtype not in (torch.bool, *FLOAT_TYPES):
            return f"mask must be bool or float, {full} or 1 in a leading place, got {mask.dtype} {tuple(mask.shape)}"
    return None


def blocks(block_m: int, block_d: int, fp32: bool) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Keys that a program takes at a time, and launch options: what leaves no register spilled on sm_80 to sm_100."""
    few, wide = block_m <= FEW_QUERIES, block_d > WIDE_HEAD_DIM
    if fp32:
        size = block_m * block_d
        keys = 16 if block_d >= WIDE_HEAD_DIM or size > 4096 else 32
        return keys, (("num_warps", 4 if size < 2048 else 8), ("num_stages", 2))
    if few and not wide:
        return 64, (("num_warps", 4), ("num_stages", 3))
    return 32, (("num_warps", 4 if few else 8), ("num_stages", 2))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else HOST_PROCESSORS


def splits(row_heads: int, capacity: int, block_keys: int, device: torch.device) -> int:
    """Over how many programs the keys of one (row, kv head) are shared out, by the size of the cache."""
    wanted = -(-PROGRAMS_A_PROCESSOR * _processors(device) // row_heads)
    return max(1, min(wanted, -(-capacity // block_keys), MAX_SPLITS))


@fused_op(
    "gqa_decode",
    "(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? mask, float scale, bool causal, int window) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda q, *_: q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3])),
)
def gqa_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
) -> torch.Tensor:
    """Attention of q over the cache, [rows, tokens, q_heads, head_dim]; formula in the module's docstring."""
    rows, q_heads, tokens, head_dim = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    y = torch.empty((rows, tokens, q_heads, head_dim), dtype=q.dtype, device=q.device)
    if y.numel() == 0:
        return y
    queries = tokens * (q_heads // kv_heads)
    block_m = max(LEAST_QUERIES, power_of_two(queries))
    block_d = max(16, power_of_two(head_dim))
    block_n, options = blocks(block_m, block_d, q.dtype == torch.float32)
    parts = splits(rows * kv_heads, capacity, block_n, q.device)
    boolean = mask is not None and mask.dtype == torch.bool
    mask_strides = (0, 0, 0, 0)
    if mask is not None:
        mask_strides = tuple(
            0 if size == 1 else step for size, step in zip(mask.shape[:3], mask.stride(), strict=False)
        )  # type: ignore[assignment]
        mask_strides = (*mask_strides[:3], mask.stride(3))
        mask = mask.view(torch.uint8) if boolean else mask
    sums, shares = None, rows * tokens * q_heads * parts
    if parts > 1:  # partial sums [row, token, head, split, head_dim], then their maxima and totals
        sums = torch.empty((shares * (head_dim + 2),), dtype=torch.float32, device=q.device)
    launch(
        _split_kernel,
        rows * kv_heads * parts,
        (q, k, v, y, lengths, mask, sums),
        (
            tokens, kv_heads, q_heads // kv_heads, capacity, parts, shares * head_dim,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides,
        ),
        (scale,),
        (head_dim, window, causal and tokens > 1, boolean, target(), parts == 1, block_m, block_n, block_d),
        options,
    )  # fmt: skip
    if sums is not None:
        launch(
            _merge_kernel,
            rows * tokens * q_heads,
            (sums, y),
            (parts, shares * head_dim),
            (),
            (head_dim, target(), max(2, power_of_two(parts)), block_d),
            (("num_warps", 4),),
        )
    return y
