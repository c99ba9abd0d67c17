"""The parts of ``skinny_gemm``'s kernel: products whose K the warps of a program share out, norm, bias, prefetch."""

from __future__ import annotations

from voxfuse.kernels._rounding import narrowed
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels.rmsnorm import scaled


@triton.jit
def _product(x, w, sums, TARGET: tl.constexpr):
    """sums + x · wᵀ of each slice; the interpreter has no product of half types, and takes fp64."""
    w = tl.trans(w, 0, 2, 1)
    if TARGET == "interpreter":
        return sums + tl.dot(x.to(tl.float64), w.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    return tl.dot(x, w, sums, input_precision="ieee")


@triton.jit
def pairwise(values, SLICES: tl.constexpr):
    """[A, B, SLICES] summed over slices, neighbours first whatever the layout: [A, B]."""
    for _ in tl.static_range(SLICES.bit_length() - 1):
        low, high = tl.split(values.reshape(values.shape[0], values.shape[1], values.shape[2] // 2, 2))
        values = low + high
    return values.reshape(values.shape[0], values.shape[1])


@triton.jit
def row_sums(values, SLICES: tl.constexpr):
    """[SLICES, M, BLOCK_K] summed over slices and k: [M]."""
    sums = tl.trans(tl.sum(values, axis=2))
    return pairwise(sums.reshape(sums.shape[0], 1, SLICES), SLICES).reshape(sums.shape[0])


@triton.jit
def normed(x, weight_ptr, k, K: tl.constexpr, rstd, ORDER: tl.constexpr, TARGET: tl.constexpr):
    """The norm of a block [SLICES, M, BLOCK_K] of x, in its type."""
    wide = x.to(tl.float32)
    weight = tl.load(weight_ptr + k, mask=k < K, other=0.0).to(tl.float32) + tl.zeros_like(wide)
    return narrowed(scaled(wide, weight, rstd[None, :, None], x, ORDER, TARGET), x, TARGET)


@triton.jit
def prefetch(
    weight_ptr, n, N, stride_wn,
    K: tl.constexpr, TARGET: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Ask for the first SPAN of K of some rows of a weight, before anything that waits: it goes to the L2 cache."""
    if TARGET == "cuda":
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
        k = tl.minimum(tl.arange(0, SPAN // LINE) * LINE, K - 1)
        where = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_wn + k[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def tile_sums(
    x, x_ptr, weight_ptr, norm_ptr, rows, real, k, n, rstd, N, stride_wn,
    K: tl.constexpr, ORDER: tl.constexpr, TARGET: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """norm(x) · weightᵀ for the outputs n, [BLOCK_M, BLOCK_N]; x is the normed block where it holds all of K."""
    sums = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    weight_ptr += n.to(tl.int64)[None, :, None] * stride_wn
    if SLICES * BLOCK_K >= K:
        w = tl.load(weight_ptr + k, mask=(n[None, :, None] < N) & (k < K), other=0.0)  # [SLICES, BLOCK_N, BLOCK_K]
        sums = _product(x, w, sums, TARGET)
    else:
        lost = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, SLICES * BLOCK_K):
            w = tl.load(weight_ptr + start + k, mask=(n[None, :, None] < N) & (start + k < K), other=0.0)
            x = tl.load(x_ptr + rows + start + k, mask=real & (start + k < K), other=0.0)
            if norm_ptr is not None:
                x = normed(x, norm_ptr, start + k, K, rstd, ORDER, TARGET)
            if weight_ptr.dtype.element_ty == tl.float32:
                part = _product(x, w, tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32), TARGET)
                total = sums + part
                back = total - sums
                lost += (sums - (total - back)) + (part - back)  # what the addition rounded away (Knuth's TwoSum)
                sums = total
            else:
                sums = _product(x, w, sums, TARGET)
        if weight_ptr.dtype.element_ty == tl.float32:
            sums = tl.where(lost == lost, sums + lost, sums)  # infinite sums lose NaN
    return pairwise(tl.permute(sums, 1, 2, 0), SLICES)


@triton.jit
def with_bias(sums, bias_ptr, n, N, like, TARGET: tl.constexpr):
    """The sums with their bias, rounded to the type."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return narrowed(sums, like, TARGET)
