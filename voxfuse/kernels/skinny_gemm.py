"""Products of a few rows with a weight, as a decode step makes them, with their neighbours in the same launch.

``skinny_linear``: y = residual + (norm(x) · weightᵀ + bias); ``skinny_swiglu``: y = silu(g) · u with
g = norm(x) · gateᵀ + gate_bias and u likewise of up. Norm, biases and residual may each be None.
Layouts: x [..., K], at most 16 rows, unit inner stride, leading dimensions that merge into two; weights [N, K] with
unit inner stride, rows any stride apart (so halves of a merged weight, and interleaved ones, are views); biases [N];
residual [..., N] as x; norm_weight [K]; y [..., N] contiguous. ``eps`` and ``order`` of the norm: see ``rmsnorm``.
Rounding is upstream's: the normed x, the product with its bias, silu and the residual sum are each rounded to the type.
A program takes BLOCK_N outputs at a time; its warps share K out among themselves and their sums are added in a fixed
order, so that equal calls give equal bits. What a row gives depends neither on the other rows nor on their number.
Contract: same-precision, for the order of sums alone. Half types run on tensor cores with fp32 sums; fp32 is fused
multiply-adds whatever ``allow_tf32`` says, 16 in a row and these sums added with compensation: rounding K of them one
after the other would cost several units in the last place, where eager may split K further at few rows.
Envelope: fp32, fp16 or bf16 of one type, 1 to 16 rows; inference only.
Source: the projections of Qwen2Attention, Qwen2MLP and their copies in transformers.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from voxfuse.kernels import rmsnorm
from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import exponential
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rounding import add_rn, mul_rn, narrowed, target
from voxfuse.kernels._rows import leading, power_of_two
from voxfuse.kernels._skinny_choice import GATED, LINEAR, type_class
from voxfuse.kernels._skinny_gemm import normed, prefetch, row_sums, tile_sums, with_bias
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels._tuned import BLOCK_OPTIONS, Options, options
from voxfuse.kernels.rmsnorm import FLOAT_TYPES

MAX_ROWS = 16
CLASSES = (512, 1024, 2048, 4096, 8192)  # of K
LANES, VECTOR_BYTES = 32, 16  # of a warp, and of a thread's load
FP32_CHAIN = 16  # products that fp32 adds one by one: more, and the error leaves the last place
HOST_PROCESSORS = 4  # in the interpreter


@triton.jit
def _skinny_gemm_kernel(
    x_ptr, weight_ptr, up_ptr, y_ptr, bias_ptr, up_bias_ptr, residual_ptr, norm_ptr,
    M, N, PROGRAMS, INNER_X, stride_xa, stride_xb, stride_wn, stride_un, INNER_R, stride_ra, stride_rb, stride_rn,
    eps,
    K: tl.constexpr, ORDER: tl.constexpr, TARGET: tl.constexpr,
    SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every PROGRAMS-th block of BLOCK_N outputs for all rows; each slice of K is a warp's."""
    m = tl.arange(0, BLOCK_M)
    rows = ((m // INNER_X).to(tl.int64) * stride_xa + (m % INNER_X) * stride_xb)[None, :, None]
    real = (m < M)[None, :, None]
    k = (tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :])[:, None, :]
    x = tl.load(x_ptr + rows + k, mask=real & (k < K), other=0.0)  # [SLICES, BLOCK_M, BLOCK_K]
    rstd = tl.zeros([BLOCK_M], tl.float32)
    if norm_ptr is not None:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        prefetch(weight_ptr, n, N, stride_wn, K, TARGET, SLICES * BLOCK_K)
        if up_ptr is not None:
            prefetch(up_ptr, n, N, stride_un, K, TARGET, SLICES * BLOCK_K)
        wide = x.to(tl.float32)
        squares = wide * wide
        for start in range(SLICES * BLOCK_K, K, SLICES * BLOCK_K):
            wide = tl.load(x_ptr + rows + start + k, mask=real & (start + k < K), other=0.0).to(tl.float32)
            squares += wide * wide
        total = row_sums(squares, SLICES)
        rstd = tl.rsqrt(tl.div_rn(total, tl.full([BLOCK_M], K, tl.float32)) + eps)
        x = normed(x, norm_ptr, k, K, rstd, ORDER, TARGET)
    like = tl.zeros([1, 1], y_ptr.dtype.element_ty)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N), PROGRAMS, num_stages=STAGES):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        sums = tile_sums(
            x, x_ptr, weight_ptr, norm_ptr, rows, real, k, n, rstd, N, stride_wn,
            K, ORDER, TARGET, SLICES, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        y = with_bias(sums, bias_ptr, n, N, like, TARGET)
        if up_ptr is not None:
            sums = tile_sums(
                x, x_ptr, up_ptr, norm_ptr, rows, real, k, n, rstd, N, stride_un,
                K, ORDER, TARGET, SLICES, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            gate, up = y.to(tl.float32), with_bias(sums, up_bias_ptr, n, N, like, TARGET).to(tl.float32)
            silu = narrowed(tl.div_rn(gate, 1.0 + exponential(-gate)), like, TARGET).to(tl.float32)
            y = narrowed(mul_rn(silu, up, TARGET), like, TARGET)
        mask = (m[:, None] < M) & (n[None, :] < N)
        if residual_ptr is not None:
            where = (m // INNER_R).to(tl.int64) * stride_ra + (m % INNER_R) * stride_rb
            residual = tl.load(residual_ptr + where[:, None] + n[None, :] * stride_rn, mask=mask, other=0.0)
            y = narrowed(add_rn(residual.to(tl.float32), y.to(tl.float32), TARGET), like, TARGET)
        tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=mask)


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    order: str,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if x.dtype not in FLOAT_TYPES or x.dim() == 0 or x.shape[-1] == 0:
        return f"x must be fp32, fp16 or bf16 [..., K], got {x.dtype} {tuple(x.shape)}"
    inputs = x.shape[-1]
    if x.numel() > MAX_ROWS * inputs:
        return f"at most {MAX_ROWS} rows, got {x.numel() // inputs}"
    if weight.dim() != 2 or weight.shape[1] != inputs or weight.dtype != x.dtype or weight.stride(1) != 1:
        found = f"{weight.dtype} {tuple(weight.shape)} {weight.stride()}"
        return f"weight must be {x.dtype} [N, {inputs}] with unit inner stride, got {found}"
    if x.stride(-1) != 1 or leading(x) is None:
        return f"x must have unit inner stride and leading dimensions that merge into two, got {x.stride()}"
    for name, vector, size in (("bias", bias, weight.shape[0]), ("norm_weight", norm_weight, inputs)):
        if vector is not None and (vector.shape != (size,) or vector.dtype != x.dtype or not vector.is_contiguous()):
            return f"{name} must be contiguous {x.dtype} [{size}], got {vector.dtype} {tuple(vector.shape)}"
    if residual is not None and (
        residual.shape != (*x.shape[:-1], weight.shape[0]) or residual.dtype != x.dtype or leading(residual) is None
    ):
        found = f"{residual.dtype} {tuple(residual.shape)} {residual.stride()}"
        return f"residual must be {x.dtype} {(*x.shape[:-1], weight.shape[0])} of mergeable rows, got {found}"
    if norm_weight is not None and order not in rmsnorm.ORDERS:
        return f"order must be one of {', '.join(rmsnorm.ORDERS)}, got {order!r}"
    return None


def _swiglu_unsupported(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    order: str,
) -> str | None:
    if up.shape != gate.shape:
        return f"gate and up must be [N, K] alike, got {tuple(gate.shape)} and {tuple(up.shape)}"
    reason = unsupported(x, gate, gate_bias, None, norm_weight, eps, order)
    return reason or unsupported(x, up, up_bias, None, norm_weight, eps, order)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    order: str,
) -> torch.Tensor:
    """The upstream chain; fp64 inputs stay fp64."""
    if norm_weight is not None:
        x = rmsnorm.reference(x, norm_weight, eps, order)
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def swiglu_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    order: str,
) -> torch.Tensor:
    """The upstream chain of a gated MLP before its down projection."""
    if norm_weight is not None:
        x = rmsnorm.reference(x, norm_weight, eps, order)
    return F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)


@functools.cache
def shape_class(dtype: torch.dtype, inputs: int) -> str:
    """By what the table knows launch options: never by the number of rows, on which no bit may depend."""
    return f"{type_class(dtype)} {next((size for size in CLASSES if inputs <= size), CLASSES[-1])}"


@functools.cache
def blocks(table: Options, rows: int, element_bytes: int) -> tuple[tuple[int, ...], Options]:
    """The kernel's block sizes and its launch options, from a row of the table."""
    found = dict(table)
    warps, span = found["num_warps"], found["block_k"]
    block_k = min(span, FP32_CHAIN) if element_bytes == 4 else span
    # So many rows, real or not, that a thread's load of x has full width: then sums over k have one order.
    least = max(1, LANES * (VECTOR_BYTES // element_bytes) // block_k)
    block_m = max(least, power_of_two(rows))
    sizes = warps * span // block_k, block_m, found["block_n"], block_k, found["num_stages"]
    launching = tuple((name, value) for name, value in table if name not in BLOCK_OPTIONS)
    return sizes, (*launching, ("enable_fp_fusion", False)) if target() == "hip" else launching


@functools.cache
def _programs(table: Options, outputs: int, device: torch.device) -> int:
    processors = HOST_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    found = dict(table)
    return min(-(-outputs // found["block_n"]), found["programs"] * processors)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    order: str,
) -> torch.Tensor:
    outputs, inputs = weight.shape
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    table = options(LINEAR if up is None else GATED, shape_class(x.dtype, inputs), x.device)
    rows = y.numel() // outputs
    sizes, launching = blocks(table, rows, x.element_size())
    programs = _programs(table, outputs, x.device)
    others = (1, 0, 0, 1) if residual is None else (*leading(residual), residual.stride(-1))  # type: ignore[misc]
    launch(
        _skinny_gemm_kernel,
        programs,
        (x, weight, up, y, *biases, residual, norm_weight),
        (
            rows, outputs, programs, *leading(x),  # type: ignore[misc]
            weight.stride(0), 0 if up is None else up.stride(0), *others,
        ),
        (eps,),
        (inputs, order, target(), *sizes),
        launching,
    )  # fmt: skip
    return y


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@fused_op(
    "skinny_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? norm_weight, float eps, str order) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    order: rmsnorm.Order,
) -> torch.Tensor:
    """residual + (norm(x) · weightᵀ + bias), [..., N]; formula in the module's docstring."""
    return _launch(x, weight, None, (bias, None), residual, norm_weight, eps, order)


@fused_op(
    "skinny_swiglu",
    "(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, Tensor? norm_weight, float eps, str order)"
    " -> Tensor",
    reference=swiglu_reference,
    unsupported=_swiglu_unsupported,
    fake=_fake,
)
def skinny_swiglu(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    order: rmsnorm.Order,
) -> torch.Tensor:
    """silu(g) · u, [..., N]; formula in the module's docstring."""
    return _launch(x, gate, up, (gate_bias, up_bias), None, norm_weight, eps, order)
