"""AdaIN and activation, channels last, from known moments: y = act((1 + γ) · ((x − μ) / √(σ² + eps) · w + b) + β).

Layouts: x [rows, at least ``frames`` frames, channels] in ``x_phases`` phases (``_phases``) with unit channel stride;
moments as ``voxfuse.kernels.moments`` gives them for x;
style [rows, 2·channels] holds γ then β; w, b [channels] or None; alpha [channels] selects Snake, act(v) = v +
sin²(alpha·v) / alpha, and None selects LeakyReLU with ``slope``. y [rows, held frames, channels] contiguous, in
``y_phases`` phases of which each has ``lead`` frames of zeros in front of its own and ``tail`` behind them
(``_phases.Layout``), zero behind each row's valid length.
Contract: same-precision. Moments merged without cancellation, arithmetic in fp32.
Envelope: fp32, fp16, bf16, one type for all but the moments; inference only.
Source: AdaIN1d and the Snake line of AdaINResBlock1 in kokoro/istftnet.py (StyleTTS 2, arXiv:2306.07691).
"""

from __future__ import annotations

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import merge_moments
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._phases import Layout, from_phases, phase_position, to_phases
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels.adain import _activate, _activated, _coefficients
from voxfuse.kernels.moments import (
    BLOCK_CHANNELS,
    BLOCK_FRAMES,
    FLOAT_TYPES,
    MAX_CHUNKS,
    MAX_ROW_ELEMENTS,
    OPTIONS,
    chunk_frames,
    phases_unsupported,
    valid_frames,
)


@triton.jit(do_not_specialize=["T", "held", "front", "CHUNK_T", "chunks", "x_per_phase", "y_per_phase"])
def _adain_kernel(
    x_ptr, y_ptr, moments_ptr, style_ptr, weight_ptr, bias_ptr, alpha_ptr, lengths_ptr,
    C, T, held, front, CHUNK_T, chunks, x_per_phase, y_per_phase, stride_xb, stride_xt, stride_style, eps, slope,
    X_PHASES: tl.constexpr, Y_PHASES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """One program a (row, chunk of frames, block of channels): merges the row's moments, then goes over its frames.
    Frame t stands for position t + front of y in the plain order, so those below 0 are the zeros in front."""
    channel_blocks = tl.cdiv(C, BLOCK_C)
    spans = tl.cdiv(held, CHUNK_T)
    channel = (tl.program_id(0) % channel_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = ((tl.program_id(0) // channel_blocks) % spans) * CHUNK_T
    row = (tl.program_id(0) // channel_blocks // spans).to(tl.int64)
    inside = (channel < C)[None, :]
    length = T if lengths_ptr is None else tl.minimum(tl.load(lengths_ptr + row).to(tl.int32), T)
    chunk = tl.arange(0, MAX_CHUNKS)
    source = moments_ptr + row * chunks * 2 * C + (chunk * 2 * C)[:, None] + channel[None, :]
    known = (chunk < chunks)[:, None] & inside
    means = tl.load(source, mask=known, other=0.0)  # [MAX_CHUNKS, BLOCK_C]
    m2 = tl.load(source + C, mask=known, other=0.0)  # [MAX_CHUNKS, BLOCK_C]
    count = tl.minimum(tl.maximum(length - chunk * CHUNK_T, 0), CHUNK_T).to(tl.float32)[:, None]
    total, mean, remainder, m2 = merge_moments(count, means, m2)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(m2, tl.maximum(total, 1.0)) - remainder * remainder + eps))
    known_channel = tl.minimum(channel, C - 1)  # lanes past the last channel repeat it; nothing of them is stored
    scale, shift, alpha = _coefficients(style_ptr, weight_ptr, bias_ptr, alpha_ptr, row, known_channel, C, stride_style)
    shift -= remainder * rstd * scale
    if alpha_ptr is not None:
        alpha = alpha[None, :]
    for start in range(first, tl.minimum(first + CHUNK_T, held), BLOCK_T):
        position = (start + tl.arange(0, BLOCK_T))[:, None]
        t = position - front
        valid = (t >= 0) & (t < length) & inside
        frame = x_ptr + row * stride_xb + phase_position(t, x_per_phase, X_PHASES) * stride_xt
        x = tl.load(frame + channel[None, :], mask=valid, other=0.0)
        deviation = x.to(tl.float32) - mean[None, :]  # [BLOCK_T, BLOCK_C]
        y = _activated(deviation, rstd[None, :], scale[None, :], shift[None, :], alpha, slope, alpha_ptr is not None)
        y = tl.where(valid, y, 0.0).to(y_ptr.dtype.element_ty)
        target = y_ptr + row * held * C + phase_position(position, y_per_phase, Y_PHASES) * C
        tl.store(target + channel[None, :], y, mask=(position < held) & inside)


def unsupported(
    x: torch.Tensor,
    moments: torch.Tensor,
    style: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    y_phases: int,
    lead: int,
    tail: int,
    eps: float,
    slope: float,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if x.dim() != 3 or x.stride(2) != 1 or x.shape[1] < frames:
        return f"x must be [rows, {frames} frames, channels], channels last, got {tuple(x.shape)} {x.stride()}"
    if (reason := phases_unsupported(x, frames, x_phases)) is not None:
        return reason
    if min(lead, tail) < 0:
        return f"frames of zeros cannot be fewer than none, got {lead} in front and {tail} behind"
    tensors = [tensor for tensor in (x, style, weight, bias, alpha) if tensor is not None]
    if x.dtype not in FLOAT_TYPES or any(tensor.dtype != x.dtype for tensor in tensors):
        return f"dtypes must be one of fp32, fp16 and bf16, the same for all, got {[str(t.dtype) for t in tensors]}"
    rows, given, channels = x.shape
    if max(given, Layout(y_phases, lead, tail).held(frames)) * max(x.stride(1), channels) >= MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^31 elements, got {given} frames at stride {x.stride(1)}"
    chunks = triton.cdiv(frames, chunk_frames(frames))
    if moments.shape != (rows, chunks, 2, channels) or not moments.is_contiguous() or moments.dtype != torch.float32:
        return f"moments must be contiguous fp32 {(rows, chunks, 2, channels)}, got {tuple(moments.shape)}"
    if style.shape != (rows, 2 * channels) or style.stride(1) != 1:
        return f"style must be [rows, 2·channels] with unit inner stride, got {tuple(style.shape)} {style.stride()}"
    if (weight is None) != (bias is None):
        return "weight and bias must be given together"
    if any(p is not None and (p.numel() != channels or not p.is_contiguous()) for p in (weight, bias, alpha)):
        return f"weight, bias and alpha must be contiguous with {channels} elements"
    if lengths is not None and (lengths.shape != (rows,) or not lengths.is_contiguous()):
        return f"lengths must be contiguous [{rows}], got {tuple(lengths.shape)}"
    return None


def reference(
    x: torch.Tensor,
    moments: torch.Tensor,
    style: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    y_phases: int,
    lead: int,
    tail: int,
    eps: float,
    slope: float,
) -> torch.Tensor:
    """The same in plain torch, channels last: moments merged, then upstream's chain behind the instance norm."""
    x = from_phases(x, frames, x_phases)
    valid = valid_frames(x, lengths)
    counts = torch.stack([part.sum(1) for part in valid.split(chunk_frames(frames), 1)], dim=1)  # [rows, chunks, 1]
    total = counts.sum(1, keepdim=True).clamp(min=1)
    means, m2 = moments.unbind(2)
    mean = (counts * means).sum(1, keepdim=True) / total
    variance = (m2 + counts * (means - mean).square()).sum(1, keepdim=True) / total
    norm = (x - mean) / (variance + eps).sqrt()
    if weight is not None and bias is not None:
        norm = norm * weight + bias
    gamma, beta = style.unsqueeze(1).chunk(2, dim=2)
    y = (1 + gamma) * norm + beta
    y = _activate(y.transpose(1, 2), alpha, slope).transpose(1, 2)
    return to_phases(torch.where(valid, y, 0.0).to(x.dtype), y_phases, lead, tail)


def _fake(x: torch.Tensor, *others: object) -> torch.Tensor:
    frames, _, *layout = others[6:11]
    return x.new_empty(x.shape[0], Layout(*layout).held(frames), x.shape[2])  # type: ignore[arg-type]


@fused_op(
    "adain_channels_last",
    "(Tensor x, Tensor moments, Tensor style, Tensor? weight, Tensor? bias, Tensor? alpha, Tensor? lengths, int frames,"
    " int x_phases, int y_phases, int lead, int tail, float eps, float slope) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def adain_channels_last(
    x: torch.Tensor,
    moments: torch.Tensor,
    style: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    y_phases: int,
    lead: int,
    tail: int,
    eps: float,
    slope: float,
) -> torch.Tensor:
    """AdaIN and activation of x, channels last; shapes and formula in the module's docstring."""
    rows, _, channels = x.shape
    held = Layout(y_phases, lead, tail).held(frames)
    y = torch.empty((rows, held, channels), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    chunk = chunk_frames(frames)
    launch(
        _adain_kernel,
        rows * triton.cdiv(held, chunk) * triton.cdiv(channels, BLOCK_CHANNELS),
        (x, y, moments, style, weight, bias, alpha, lengths),
        (
            *(channels, frames, held, lead * y_phases, chunk, moments.shape[1]),
            *(x.shape[1] // x_phases, held // y_phases),
            *(x.stride(0), x.stride(1), style.stride(0)),
        ),
        (eps, slope),
        (x_phases, y_phases, BLOCK_FRAMES, BLOCK_CHANNELS, MAX_CHUNKS),
        OPTIONS,
    )
    return y
