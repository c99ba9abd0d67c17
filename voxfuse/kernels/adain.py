"""Adaptive instance norm with Snake or LeakyReLU: y = act((1 + γ) · ((x − μ) / √(σ² + eps) · w + b) + β).

Layouts: x and y [rows, channels, frames]; style [rows, 2·channels] holds γ then β; w, b [channels] or None; alpha
[channels] selects Snake, act(v) = v + sin²(alpha·v) / alpha, and None selects LeakyReLU with ``slope``. μ and the
biased σ² are taken over the first ``lengths[row]`` frames (all of them for None); y is zero behind them.
Contract: same-precision. Statistics in fp32, one pass, merged without cancellation; arithmetic in fp32 for every input
type. y has the type that eager promotion gives: that of x, style and alpha together.
Envelope: fp32, fp16, bf16, any strides, at least two frames (upstream refuses one), inference only. Kernels specialise
on whether the frames divide by 16 (wide loads and stores), so a configuration compiles twice at most as T varies.
Launch options: ``tuned.json``. On an H200 the longest resident rows take 106 registers unless limited to 80: two
programs a multiprocessor, and 1.7 times as long.
Source: AdaIN1d and the Snake line of AdaINResBlock1 in kokoro/istftnet.py (StyleTTS 2, arXiv:2306.07691).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import merge_moments, sin_squared
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels._tuned import options

OPERATION = "adain_act"
MAX_ROW_ELEMENTS = 2**31 - 2**16  # offsets within a row are int32, and the last block may reach past its end
RESIDENT_FRAMES = 8192  # a row up to here stays in registers between its statistics and its output
STREAM_FRAMES = 8192  # frames of a longer row that one program holds at a time
STREAMING = "streaming"
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _valid_length(lengths_ptr, row, T):
    """A row's valid frames, kept within [0, T]: the host cannot check what lies on the device."""
    return tl.minimum(tl.maximum(tl.load(lengths_ptr + row), 0), T).to(tl.int32)


@triton.jit
def _coefficients(style_ptr, weight_ptr, bias_ptr, alpha_ptr, row, channel, C, stride_style):
    """Scale (1 + γ) · w, shift (1 + γ) · b + β, and Snake's alpha of one (row, channel)."""
    gain = 1.0 + tl.load(style_ptr + row * stride_style + channel).to(tl.float32)
    shift = tl.load(style_ptr + row * stride_style + C + channel).to(tl.float32)
    scale = gain
    if weight_ptr is not None:
        scale = gain * tl.load(weight_ptr + channel).to(tl.float32)
        shift += gain * tl.load(bias_ptr + channel).to(tl.float32)
    alpha = 1.0
    if alpha_ptr is not None:
        alpha = tl.load(alpha_ptr + channel).to(tl.float32)
    return scale, shift, alpha


@triton.jit
def _activated(deviation, rstd, scale, shift, alpha, slope, SNAKE: tl.constexpr):
    y = (deviation * rstd) * scale + shift
    return y + (1.0 / alpha) * sin_squared(alpha * y) if SNAKE else tl.where(y >= 0, y, y * slope)


@triton.jit
def _resident_kernel(
    x_ptr, y_ptr, style_ptr, weight_ptr, bias_ptr, alpha_ptr, lengths_ptr,
    C, T, stride_xb, stride_xc, stride_xt, stride_style, eps, slope,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program a (row, channel): the row is read once and stays in registers."""
    row = (tl.program_id(0) // C).to(tl.int64)
    channel = (tl.program_id(0) % C).to(tl.int64)
    length = T if lengths_ptr is None else _valid_length(lengths_ptr, row, T)
    scale, shift, alpha = _coefficients(style_ptr, weight_ptr, bias_ptr, alpha_ptr, row, channel, C, stride_style)
    t = tl.arange(0, BLOCK_T)
    valid = t < length
    source = x_ptr + row * stride_xb + channel * stride_xc
    x = tl.load(source + t * stride_xt, mask=t < T, other=0.0).to(tl.float32)  # [BLOCK_T]
    x = tl.where(valid, x, 0.0)
    frames = tl.maximum(length, 1).to(tl.float32)
    mean = tl.sum(x, axis=0) / frames
    deviation = tl.where(valid, x - mean, 0.0)
    remainder = tl.sum(deviation, axis=0) / frames  # what rounding left of the mean
    variance = tl.div_rn(tl.sum(deviation * deviation, axis=0), frames) - remainder * remainder
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    shift -= remainder * rstd * scale
    y = _activated(deviation, rstd, scale, shift, alpha, slope, alpha_ptr is not None)
    y = tl.where(valid, y, 0.0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (row * C + channel) * T + t, y, mask=t < T)


@triton.jit
def _streaming_kernel(
    x_ptr, y_ptr, style_ptr, weight_ptr, bias_ptr, alpha_ptr, lengths_ptr,
    C, T, stride_xb, stride_xc, stride_xt, stride_style, eps, slope,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program a (row, channel): a pass for the statistics, then one backwards that meets the row's end in L2.

    Statistics: Welford (1962) per lane, then merged. Whole blocks carry no mask; the last, partial one does.
    """
    row = (tl.program_id(0) // C).to(tl.int64)
    channel = (tl.program_id(0) % C).to(tl.int64)
    length = T if lengths_ptr is None else _valid_length(lengths_ptr, row, T)
    scale, shift, alpha = _coefficients(style_ptr, weight_ptr, bias_ptr, alpha_ptr, row, channel, C, stride_style)
    source = x_ptr + row * stride_xb + channel * stride_xc
    target = y_ptr + (row * C + channel) * T
    lane = tl.arange(0, BLOCK_T)
    whole = length // BLOCK_T
    seen = 0.0
    mean = tl.zeros([BLOCK_T], tl.float32)
    m2 = tl.zeros([BLOCK_T], tl.float32)
    for block in range(0, whole):
        x = tl.load(source + (block * BLOCK_T + lane) * stride_xt).to(tl.float32)  # [BLOCK_T]
        seen += 1.0
        delta = x - mean
        mean += delta * (1.0 / seen)
        m2 += delta * (x - mean)
    t = whole * BLOCK_T + lane
    valid = t < length
    x = tl.load(source + t * stride_xt, mask=valid, other=0.0).to(tl.float32)  # [BLOCK_T]
    delta = tl.where(valid, x - mean, 0.0)
    mean += delta * (1.0 / (seen + 1.0))
    m2 += delta * (x - mean)
    total, mean, remainder, m2 = merge_moments(tl.where(valid, seen + 1.0, seen), mean, m2)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(m2, tl.maximum(total, 1.0)) + eps))
    shift -= remainder * rstd * scale
    y = _activated(x - mean, rstd, scale, shift, alpha, slope, alpha_ptr is not None)
    tl.store(target + t, tl.where(valid, y, 0.0).to(y_ptr.dtype.element_ty), mask=t < T)
    for block in range(0, whole):
        t = (whole - 1 - block) * BLOCK_T + lane
        x = tl.load(source + t * stride_xt, eviction_policy="evict_first").to(tl.float32)  # [BLOCK_T]
        y = _activated(x - mean, rstd, scale, shift, alpha, slope, alpha_ptr is not None)
        tl.store(target + t, y.to(y_ptr.dtype.element_ty), eviction_policy="evict_first")
    for start in range((whole + 1) * BLOCK_T, T, BLOCK_T):
        t = start + lane
        tl.store(target + t, tl.zeros([BLOCK_T], y_ptr.dtype.element_ty), mask=t < T)


def _output_dtype(x: torch.Tensor, style: torch.Tensor, alpha: torch.Tensor | None) -> torch.dtype:
    dtype = x.dtype if style.dtype == x.dtype else torch.promote_types(x.dtype, style.dtype)
    return dtype if alpha is None or alpha.dtype == dtype else torch.promote_types(dtype, alpha.dtype)


def unsupported(
    x: torch.Tensor,
    style: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    eps: float,
    slope: float,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if x.dim() != 3:
        return f"x must be [rows, channels, frames], got {x.dim()} dimensions"
    tensors = [tensor for tensor in (x, style, weight, bias, alpha) if tensor is not None]
    if any(tensor.dtype not in FLOAT_TYPES for tensor in tensors):
        return f"dtypes must be fp32, fp16 or bf16, got {', '.join(str(tensor.dtype) for tensor in tensors)}"
    rows, channels, frames = x.shape
    if frames == 1:
        return "a single frame has no variance: upstream refuses it too"
    if frames * max(x.stride(2), 1) >= MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^31 elements, got {frames} frames at stride {x.stride(2)}"
    if style.shape != (rows, 2 * channels) or style.stride(1) != 1:
        return f"style must be [rows, 2·channels] with unit inner stride, got {tuple(style.shape)} {style.stride()}"
    if (weight is None) != (bias is None):
        return "weight and bias must be given together"
    if any(p is not None and (p.numel() != channels or not p.is_contiguous()) for p in (weight, bias, alpha)):
        return f"weight, bias and alpha must be contiguous with {channels} elements"
    if lengths is not None and (
        lengths.shape != (rows,) or not lengths.is_contiguous() or lengths.dtype not in (torch.int32, torch.int64)
    ):
        return f"lengths must be contiguous int32 or int64 [{rows}], got {lengths.dtype} {tuple(lengths.shape)}"
    return None


def reference(
    x: torch.Tensor,
    style: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    eps: float,
    slope: float,
) -> torch.Tensor:
    """The upstream chain; with ``lengths``, row by row on the row's valid frames."""
    if lengths is not None:
        y = x.new_zeros(x.shape, dtype=_output_dtype(x, style, alpha))
        for row, length in enumerate(lengths.clamp(0, x.shape[2]).tolist()):
            if length > 1:
                one = slice(row, row + 1)
                y[one, :, :length] = reference(x[one, :, :length], style[one], weight, bias, alpha, None, eps, slope)
            elif length == 1:  # zero deviation leaves only the biases, as a bucketed graph needs
                y[row, :, :1] = _one_frame(x[row, :, :1], style[row], bias, alpha, slope)
        return y
    gamma, beta = style.unsqueeze(-1).chunk(2, dim=1)
    norm = F.instance_norm(x, weight=weight, bias=bias, use_input_stats=True, eps=eps)
    return _activate((1 + gamma) * norm + beta, alpha, slope)


def _one_frame(
    x: torch.Tensor, style: torch.Tensor, bias: torch.Tensor | None, alpha: torch.Tensor | None, slope: float
) -> torch.Tensor:
    gamma, beta = style.unsqueeze(-1).chunk(2, dim=0)
    norm = torch.zeros_like(x) if bias is None else bias.unsqueeze(-1).to(x.dtype)
    return _activate(((1 + gamma) * norm + beta).unsqueeze(0), alpha, slope)[0]


def _activate(y: torch.Tensor, alpha: torch.Tensor | None, slope: float) -> torch.Tensor:
    if alpha is None:
        return F.leaky_relu(y, slope)
    a = alpha.reshape(1, -1, 1)
    return y + (1 / a) * (torch.sin(a * y) ** 2)


def _fake(
    x: torch.Tensor,
    style: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    eps: float,
    slope: float,
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=_output_dtype(x, style, alpha))


@functools.cache
def _resident_block(frames: int) -> tuple[int, str]:
    """Block size and shape class of the resident kernel for a row length."""
    block = max(triton.next_power_of_2(frames), 128)
    return block, f"resident {block}"


def shape_class(frames: int) -> str:
    """Under what the table of launch options keeps a row length."""
    return _resident_block(frames)[1] if frames <= RESIDENT_FRAMES else STREAMING


@fused_op(
    OPERATION,
    "(Tensor x, Tensor style, Tensor? weight, Tensor? bias, Tensor? alpha, Tensor? lengths, float eps, float slope)"
    " -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def adain_act(
    x: torch.Tensor,
    style: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    eps: float,
    slope: float,
) -> torch.Tensor:
    """AdaIN and activation of x [rows, channels, frames]; shapes and formula in the module's docstring."""
    rows, channels, frames = x.shape
    dtype = _output_dtype(x, style, alpha)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    if frames <= RESIDENT_FRAMES:
        kernel, (block, kind) = _resident_kernel, _resident_block(frames)
    else:
        kernel, block, kind = _streaming_kernel, STREAM_FRAMES, STREAMING
    launch(
        kernel,
        rows * channels,
        (x, y, style, weight, bias, alpha, lengths),
        (channels, frames, *x.stride(), style.stride(0)),
        (eps, slope),
        (block,),
        options(OPERATION, kind, x.device),
    )
    return y
