"""RMSNorm, with the residual addition before it where there is one: y = x / √(mean(x²) + eps) · weight.

Layouts: x, residual [..., width], y and sum the same shape, contiguous; weight [width]. ``rms_norm`` gives y;
``add_rms_norm`` gives (y, sum) with sum = residual + x rounded to their type, as the next addition needs it.
``order`` says where the upstream class rounds; all compute mean and rsqrt in fp32 (n = x · rsqrt below):
- "cast_then_scale": weight · type(n). Llama, Qwen2, Qwen3, Qwen3-Omni, Mistral. y has the promoted type.
- "scale_then_cast": type(n · fp32(weight)). Olmo 2, torch's own RMSNorm.
- "one_plus": type(n · (1 + fp32(weight))). Gemma.
- "alpha": type(x · (fp32(weight) · rsqrt)), which associates otherwise. MOSS-Audio-Tokenizer, Moshi, Mimi.
Contract: same-precision, for the order of the sum of squares alone: every other operation rounds where eager rounds
(products uncontracted), so that y is bitwise eager's wherever the two sums agree. ``sum`` is bitwise.
Envelope: fp32, fp16 or bf16, any width and strides whose leading dimensions merge into two; x and residual of one type;
inference only.
Source: LlamaRMSNorm, Gemma3RMSNorm of transformers; RMSNorm of MOSS-Audio-Tokenizer (arXiv:1910.07467).
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rounding import add_rn, mul_rn, narrowed, target
from voxfuse.kernels._rows import leading, leading_pair, power_of_two
from voxfuse.kernels._triton import tl, triton

Order = Literal["cast_then_scale", "scale_then_cast", "one_plus", "alpha"]
ORDERS = ("cast_then_scale", "scale_then_cast", "one_plus", "alpha")
RESIDENT_WIDTH = 16_384  # a row up to here is read once
STREAM_WIDTH = 8_192  # elements of a wider row that are held at a time
ELEMENTS_A_THREAD = 8  # 16 bytes of a half type
MAX_WARPS = 16
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _row(x_ptr, residual_ptr, sum_ptr, n, mask, stride_xn, stride_rn, TARGET: tl.constexpr, STORE: tl.constexpr):
    """A block of the row that is normalised, in fp32: x, or the rounded residual + x (stored where STORE)."""
    x = tl.load(x_ptr + n * stride_xn, mask=mask, other=0.0)  # [BLOCK]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + n * stride_rn, mask=mask, other=0.0)  # [BLOCK]
        x = narrowed(add_rn(residual.to(tl.float32), x.to(tl.float32), TARGET), x, TARGET)
        if STORE:
            tl.store(sum_ptr + n, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def scaled(x, weight, rstd, narrow, ORDER: tl.constexpr, TARGET: tl.constexpr):
    """x · rstd · weight in fp32, rounded as ``order`` says; ``narrow``: a value of the type that upstream casts to."""
    rstd += tl.zeros_like(x)
    if ORDER == "alpha":
        y = mul_rn(x, mul_rn(weight, rstd, TARGET), TARGET)
    elif ORDER == "cast_then_scale":
        y = mul_rn(weight, narrowed(mul_rn(x, rstd, TARGET), narrow, TARGET).to(tl.float32), TARGET)
    elif ORDER == "one_plus":
        y = mul_rn(mul_rn(x, rstd, TARGET), 1.0 + weight, TARGET)
    else:
        y = mul_rn(mul_rn(x, rstd, TARGET), weight, TARGET)
    return y


@triton.jit
def _rmsnorm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr,
    INNER, N, stride_xa, stride_xb, stride_xn, stride_ra, stride_rb, stride_rn,
    eps, inverse_n,
    ORDER: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr, RESIDENT: tl.constexpr,
):  # fmt: skip
    """One program a row: once through registers, or in two passes of blocks where it is wider."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += (row // INNER) * stride_xa + (row % INNER) * stride_xb
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += (row // INNER) * stride_ra + (row % INNER) * stride_rb
        sum_ptr += row * N
    lane = tl.arange(0, BLOCK)
    if RESIDENT:
        mask = lane < N
        weight = tl.load(weight_ptr + lane, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
        x = _row(x_ptr, residual_ptr, sum_ptr, lane, mask, stride_xn, stride_rn, TARGET, True)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) * inverse_n + eps)
        narrow = tl.zeros([1], x_ptr.dtype.element_ty)
        y = scaled(x, weight, rstd, narrow, ORDER, TARGET)
        tl.store(y_ptr + lane, narrowed(y, tl.zeros([1], y_ptr.dtype.element_ty), TARGET), mask=mask)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            n = start + lane
            x = _row(x_ptr, residual_ptr, sum_ptr, n, n < N, stride_xn, stride_rn, TARGET, True)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=0) * inverse_n + eps)
        narrow = tl.zeros([1], x_ptr.dtype.element_ty)
        for start in range(0, N, BLOCK):
            n = start + lane
            weight = tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32)  # [BLOCK]
            x = _row(x_ptr, residual_ptr, sum_ptr, n, n < N, stride_xn, stride_rn, TARGET, False)
            y = scaled(x, weight, rstd, narrow, ORDER, TARGET)
            tl.store(y_ptr + n, narrowed(y, tl.zeros([1], y_ptr.dtype.element_ty), TARGET), mask=n < N)


def output_dtype(x: torch.Tensor, weight: torch.Tensor, order: str) -> torch.dtype:
    """The type that the upstream chain gives."""
    if order == "cast_then_scale" and weight.dtype != x.dtype:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


def unsupported(x: torch.Tensor, weight: torch.Tensor, eps: float, order: str) -> str | None:
    """Why a call is outside the envelope, or None."""
    if order not in ORDERS:
        return f"order must be one of {', '.join(ORDERS)}, got {order!r}"
    if x.dtype not in FLOAT_TYPES or weight.dtype not in FLOAT_TYPES:
        return f"dtypes must be fp32, fp16 or bf16, got {x.dtype} and {weight.dtype}"
    if x.dim() == 0 or weight.shape != x.shape[-1:] or not weight.is_contiguous():
        return f"weight must be contiguous [width] of x {tuple(x.shape)}, got {tuple(weight.shape)} {weight.stride()}"
    if leading(x) is None:
        return f"leading dimensions must merge into two, got {tuple(x.shape)} with strides {x.stride()}"
    return None


def _add_unsupported(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, order: str
) -> str | None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        return f"residual must be {x.dtype} {tuple(x.shape)} as x, got {residual.dtype} {tuple(residual.shape)}"
    if leading_pair(x, residual) is None:
        return f"leading dimensions of x and residual must merge alike, got strides {x.stride()}, {residual.stride()}"
    return unsupported(x, weight, eps, order)


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, order: str) -> torch.Tensor:
    """The upstream chain of each order; fp64 inputs stay fp64, which makes it the oracle."""
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    rstd = torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if order == "cast_then_scale":
        return weight * (values * rstd).to(x.dtype)
    if order == "scale_then_cast":
        return (values * rstd * weight.to(wide)).to(x.dtype)
    if order == "one_plus":
        return (values * rstd * (1.0 + weight.to(wide))).to(x.dtype)
    return (values * (weight.to(wide) * rstd)).to(x.dtype)


def add_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, order: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The upstream chain with the residual addition before it."""
    total = residual + x
    return reference(total, weight, eps, order), total


@functools.cache
def _options(width: int) -> tuple[int, bool, tuple[tuple[str, int], ...]]:
    """Block, whether a row stays resident, and launch options, for a width."""
    resident = width <= RESIDENT_WIDTH
    block = power_of_two(width) if resident else STREAM_WIDTH
    warps = min(max(block // (32 * ELEMENTS_A_THREAD), 1), MAX_WARPS)
    options = (("num_warps", warps), ("enable_fp_fusion", False)) if target() == "hip" else (("num_warps", warps),)
    return block, resident, options


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    order: str,
) -> None:
    width = x.shape[-1]
    inner, *strides = leading(x)  # type: ignore[misc]
    others = [0, 0, 0]
    if residual is not None:
        inner, *both = leading_pair(x, residual)  # type: ignore[misc]
        strides, others = both[:2], [*both[2:], residual.stride(-1)]
    block, resident, options = _options(width)
    launch(
        _rmsnorm_kernel,
        x.numel() // width,
        (x, residual, weight, y, total),
        (inner, width, *strides, x.stride(-1), *others),
        (eps, 1.0 / width),
        (order, target(), block, resident),
        options,
    )


@fused_op(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps, str order) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda x, weight, eps, order: x.new_empty(x.shape, dtype=output_dtype(x, weight, order)),
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, order: Order) -> torch.Tensor:
    """RMSNorm of x [..., width]; formula and orders in the module's docstring."""
    y = torch.empty(x.shape, dtype=output_dtype(x, weight, order), device=x.device)
    if y.numel():
        _launch(x, None, weight, y, None, eps, order)
    return y


def _add_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, order: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=output_dtype(x, weight, order)), x.new_empty(x.shape)


@fused_op(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps, str order) -> (Tensor, Tensor)",
    reference=add_reference,
    unsupported=_add_unsupported,
    fake=_add_fake,
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, order: Order
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of residual + x, residual + x), each [..., width]."""
    y = torch.empty(x.shape, dtype=output_dtype(x, weight, order), device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        _launch(x, residual, weight, y, total, eps, order)
    return y, total
