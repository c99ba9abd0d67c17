"""What stands after a convolution of a Snake vocoder, in one pass: r = x + bias + residual, y = snake(r), where
snake(r) = r + sin²(α·r) / (α + eps).

Layouts: x [rows, at least ``frames`` frames, channels] in ``x_phases`` phases of equal length (``_phases``), residual
[rows, frames, channels], any strides; bias, alpha [channels]. r [rows, frames, channels] contiguous, in plain order; y
[rows, held frames, channels] contiguous, in ``y_phases`` phases of which each has ``lead`` frames of zeros in front of
its own and ``tail`` behind them (``_phases.Layout``), as the next convolution wants it. Both are zero behind each
row's valid length (``lengths`` [rows]; all frames for None). r is only written where ``keep``, y only where
there is an alpha; what is not written has no elements. eps is 1e-9, and an alpha of 0 gives y = r.
Contract: same-precision. r has the bits of eager in fp32; fp16 and bf16 round once at the end of r and y each, where
eager rounds after every operation. Not bitwise: the sine is a polynomial of this library (``_math.sin_squared``),
within 2e-7 of CUDA's for |α·r| < 1e3 and 5e-7 for 1e6, since CUDA's own needs a stack and is on no other target.
Envelope: fp32, fp16, bf16, one type for all tensors; inference only.
Source: ResBlock.forward in cosyvoice/hifigan/generator.py and Snake.forward in cosyvoice/transformer/activation.py.
"""

from __future__ import annotations

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import sin_squared
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._phases import Layout, from_phases, phase_position, to_phases
from voxfuse.kernels._rows import power_of_two
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels.moments import (
    FLOAT_TYPES,
    MAX_ROW_ELEMENTS,
    neighbours_unsupported,
    phases_unsupported,
    valid_frames,
)

EPS = 1e-9  # upstream's no_div_by_zero
BLOCK_ELEMENTS = 2048  # a program
MAX_BLOCK_CHANNELS = 64
OPTIONS = (("num_warps", 4),)


@triton.jit(do_not_specialize=["T", "held", "front", "x_per_phase", "y_per_phase"])
def _snake_kernel(
    x_ptr, raw_ptr, y_ptr, bias_ptr, residual_ptr, alpha_ptr, lengths_ptr,
    C, T, held, front, x_per_phase, y_per_phase, stride_xb, stride_xt, stride_xc, stride_rb, stride_rt, stride_rc,
    X_PHASES: tl.constexpr, Y_PHASES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program a (row, block of frames, block of channels), last rows first: they are what the convolution has left
    in L2. Frame t stands for position t + front of y in the plain order, so those below 0 are the zeros in front."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    channel_blocks = tl.cdiv(C, BLOCK_C)
    blocks = tl.cdiv(held, BLOCK_T)
    channel = (program % channel_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    position = (((program // channel_blocks) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    t = position - front
    row = (program // channel_blocks // blocks).to(tl.int64)
    inside = (channel < C)[None, :]
    length = T if lengths_ptr is None else tl.minimum(tl.load(lengths_ptr + row).to(tl.int32), T)
    valid = (t >= 0) & (t < length) & inside
    frame = x_ptr + row * stride_xb + phase_position(t, x_per_phase, X_PHASES) * stride_xt
    r = tl.load(frame + channel[None, :] * stride_xc, mask=valid, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_C]
    if bias_ptr is not None:
        r += tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:
        source = residual_ptr + row * stride_rb + t * stride_rt + channel[None, :] * stride_rc
        r += tl.load(source, mask=valid, other=0.0).to(tl.float32)
    r = tl.where(valid, r, 0.0)
    if raw_ptr is not None:
        rounded = r.to(raw_ptr.dtype.element_ty)
        tl.store(raw_ptr + row * T * C + t * C + channel[None, :], rounded, mask=(t >= 0) & (t < T) & inside)
    if alpha_ptr is not None:
        alpha = tl.load(alpha_ptr + channel, mask=channel < C, other=1.0).to(tl.float32)
        inverse = tl.div_rn(1.0, alpha + 1e-9)[None, :]
        y = r + inverse * sin_squared(r * alpha[None, :])
        y = tl.where(valid, y, 0.0).to(y_ptr.dtype.element_ty)  # an infinite inverse makes NaN of zero
        target = y_ptr + row * held * C + phase_position(position, y_per_phase, Y_PHASES) * C
        tl.store(target + channel[None, :], y, mask=(position < held) & inside)


def unsupported(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    y_phases: int,
    lead: int,
    tail: int,
    keep: bool,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if x.dim() != 3 or x.shape[1] < frames:
        return f"x must be [rows, at least {frames} frames, channels], got {tuple(x.shape)}"
    if (reason := phases_unsupported(x, frames, x_phases)) is not None:
        return reason
    if x.dtype not in FLOAT_TYPES:
        return f"dtype must be one of fp32, fp16 and bf16, got {x.dtype}"
    if min(lead, tail) < 0:
        return f"frames of zeros cannot be fewer than none, got {lead} in front and {tail} behind"
    rows, given, channels = x.shape
    written = Layout(y_phases, lead, tail).held(frames) * channels
    if max(given * x.stride(1) + channels * x.stride(2), written) >= MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^31 elements, got {given} frames at strides {x.stride()}"
    if alpha is not None and (alpha.dtype != x.dtype or alpha.shape != (channels,) or not alpha.is_contiguous()):
        return f"alpha must be contiguous {x.dtype} [{channels}], got {alpha.dtype} {tuple(alpha.shape)}"
    return neighbours_unsupported((rows, frames, channels), x.dtype, bias, residual, lengths)


def reference(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    y_phases: int,
    lead: int,
    tail: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The upstream chain, channels last; then the zero tail and the phases."""
    raw = from_phases(x, frames, x_phases)
    for term in (bias, residual):
        raw = raw if term is None else raw + term
    valid = valid_frames(raw, lengths)
    raw = torch.where(valid, raw, 0.0).contiguous()
    y = x.new_empty(0)
    if alpha is not None:
        y = raw + (1.0 / (alpha + EPS)) * torch.pow(torch.sin(raw * alpha), 2)
        y = to_phases(torch.where(valid, y, 0.0), y_phases, lead, tail).contiguous()
    return raw if keep else x.new_empty(0), y


def _fake(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    y_phases: int,
    lead: int,
    tail: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, channels = x.shape
    raw = x.new_empty((rows, frames, channels) if keep else 0)
    return raw, x.new_empty(0 if alpha is None else (rows, Layout(y_phases, lead, tail).held(frames), channels))


@fused_op(
    "snake",
    "(Tensor x, Tensor? bias, Tensor? residual, Tensor? alpha, Tensor? lengths, int frames, int x_phases,"
    " int y_phases, int lead, int tail, bool keep) -> (Tensor, Tensor)",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def snake(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    y_phases: int,
    lead: int,
    tail: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """r and y; shapes and formula in the module's docstring."""
    raw, y = _fake(x, bias, residual, alpha, lengths, frames, x_phases, y_phases, lead, tail, keep)
    if raw.numel() + y.numel() == 0:
        return raw, y
    rows, _, channels = x.shape
    held = Layout(y_phases, lead, tail).held(frames)
    block_channels = min(power_of_two(channels), MAX_BLOCK_CHANNELS)
    block_frames = BLOCK_ELEMENTS // block_channels
    launch(
        _snake_kernel,
        rows * triton.cdiv(held, block_frames) * triton.cdiv(channels, block_channels),
        (x, raw if keep else None, y if alpha is not None else None, bias, residual, alpha, lengths),
        (
            *(channels, frames, held, lead * y_phases),
            *(x.shape[1] // x_phases, held // y_phases),
            *x.stride(),
            *((0, 0, 0) if residual is None else residual.stride()),
        ),
        (),
        (x_phases, y_phases, block_frames, block_channels),
        OPTIONS,
    )
    return raw, y
