"""What stands after a convolution, in one pass: y = x + bias + residual, and the moments of y for the next AdaIN.

Layouts: x [rows, at least ``frames`` frames, channels] in ``phases`` phases of equal length (``_phases``), residual
[rows, frames, channels], any strides; bias [channels]; y [rows, frames, channels] contiguous, zero behind each row's
valid length (``lengths`` [rows]; all frames for None). Moments [rows, chunks, 2, channels] in fp32: mean, and sum of
squared deviations from it, of each chunk of ``chunk_frames(frames)`` frames, as far as they are valid. The moments are
those of y as it was rounded to its type.
Contract: same-precision. Arithmetic in fp32, one rounding where eager rounds after each of the two additions. Moments
by Welford (1962), merged without cancellation. Envelope: fp32, fp16, bf16, one type for all tensors; inference only.
Source: ``xt + x`` around the convolutions of AdaINResBlock1 in kokoro/istftnet.py, and the statistics of its AdaIN1d.
"""

from __future__ import annotations

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import merge_moments
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._phases import from_phases, padded_frames, phase_position
from voxfuse.kernels._triton import tl, triton

MAX_ROW_ELEMENTS = 2**31 - 2**16  # offsets within a row are int32, and the last block may reach past its end
MAX_CHUNKS = 128  # partial moments of a row; the consumer merges them at its start
BLOCK_FRAMES = 64
BLOCK_CHANNELS = 64
OPTIONS = (("num_warps", 4),)
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=["T", "CHUNK_T", "chunks", "per_phase"])
def _moments_kernel(
    x_ptr, y_ptr, moments_ptr, bias_ptr, residual_ptr, lengths_ptr,
    C, T, CHUNK_T, chunks, per_phase, stride_xb, stride_xt, stride_xc, stride_rb, stride_rt, stride_rc,
    PHASES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program a (row, chunk of frames, block of channels), last rows first: they are what the convolution has left
    in L2."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    channel_blocks = tl.cdiv(C, BLOCK_C)
    channel = (program % channel_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    chunk = (program // channel_blocks) % chunks
    row = (program // channel_blocks // chunks).to(tl.int64)
    inside = (channel < C)[None, :]
    first = chunk * CHUNK_T
    length = T if lengths_ptr is None else tl.load(lengths_ptr + row).to(tl.int32)
    lane = tl.arange(0, BLOCK_T)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    seen = 0.0
    mean = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    m2 = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(first, tl.minimum(first + CHUNK_T, T), BLOCK_T):
        t = (start + lane)[:, None]
        valid = (t < length) & inside
        frame = x_ptr + row * stride_xb + phase_position(t, per_phase, PHASES) * stride_xt
        x = tl.load(frame + channel[None, :] * stride_xc, mask=valid, other=0.0)
        y = x.to(tl.float32) + bias  # [BLOCK_T, BLOCK_C]
        if residual_ptr is not None:
            source = residual_ptr + row * stride_rb + t * stride_rt + channel[None, :] * stride_rc
            y += tl.load(source, mask=valid, other=0.0).to(tl.float32)
        if y_ptr is not None:
            rounded = tl.where(valid, y, 0.0).to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * T * C + t * C + channel[None, :], rounded, mask=(t < T) & inside)
            y = rounded.to(tl.float32)
        seen += 1.0
        delta = tl.where(valid, y - mean, 0.0)
        mean += delta * (1.0 / seen)
        m2 += delta * (y - mean)
    last = tl.minimum(length, tl.minimum(first + CHUNK_T, T))
    count = tl.maximum(tl.cdiv(last - first - lane, BLOCK_T), 0).to(tl.float32)[:, None]
    total, merged, remainder, m2 = merge_moments(count, mean, m2)
    target = moments_ptr + ((row * chunks + chunk) * 2) * C + channel
    tl.store(target, merged + remainder, mask=channel < C)
    tl.store(target + C, m2 - total * remainder * remainder, mask=channel < C)


def chunk_frames(frames: int) -> int:
    """Frames that one partial moment of a row covers: whole blocks, so that a row has at most ``MAX_CHUNKS`` chunks."""
    return max(triton.cdiv(triton.cdiv(frames, MAX_CHUNKS), BLOCK_FRAMES), 1) * BLOCK_FRAMES


def neighbours_unsupported(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> str | None:
    """Why bias, residual and lengths do not suit a y of shape [rows, frames, channels] and dtype, or None."""
    rows, frames, channels = shape
    if any(tensor is not None and tensor.dtype != dtype for tensor in (bias, residual)):
        return f"bias and residual must have the type of x, {dtype}"
    if frames * channels >= MAX_ROW_ELEMENTS:
        return f"a row must have fewer than 2^31 elements, got {frames} frames of {channels} channels"
    if residual is not None and residual.shape != shape:
        return f"residual must be {list(shape)}, got {tuple(residual.shape)}"
    if residual is not None and _span(residual, frames) >= MAX_ROW_ELEMENTS:
        return f"a row of residual must span fewer than 2^31 elements, got strides {residual.stride()}"
    if bias is not None and (bias.shape != (channels,) or not bias.is_contiguous()):
        return f"bias must be contiguous [{channels}], got {tuple(bias.shape)}"
    if lengths is not None and (lengths.shape != (rows,) or not lengths.is_contiguous()):
        return f"lengths must be contiguous [{rows}], got {tuple(lengths.shape)}"
    return None


def phases_unsupported(x: torch.Tensor, frames: int, phases: int) -> str | None:
    """Why x [rows, frames, channels] does not hold ``frames`` in phases of equal length, or None."""
    least = padded_frames(frames, phases)
    if phases > 1 and (x.shape[1] % phases or x.shape[1] < least):
        return f"x must have {phases} phases alike of together at least {least} frames, got {x.shape[1]} frames"
    return None


def _span(x: torch.Tensor, frames: int) -> int:
    return frames * x.stride(1) + x.shape[2] * x.stride(2)


def unsupported(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    phases: int,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if x.dim() != 3 or x.shape[1] < frames:
        return f"x must be [rows, at least {frames} frames, channels], got {tuple(x.shape)}"
    if (reason := phases_unsupported(x, frames, phases)) is not None:
        return reason
    if x.dtype not in FLOAT_TYPES:
        return f"x must be fp32, fp16 or bf16, got {x.dtype}"
    if _span(x, x.shape[1]) >= MAX_ROW_ELEMENTS:
        return f"a row of x must span fewer than 2^31 elements, got strides {x.stride()}"
    return neighbours_unsupported((x.shape[0], frames, x.shape[2]), x.dtype, bias, residual, lengths)


def valid_frames(x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Mask [rows, frames, 1] of the frames of x [rows, frames, channels] before each row's length."""
    ends = torch.full((x.shape[0],), x.shape[1], device=x.device) if lengths is None else lengths
    return (torch.arange(x.shape[1], device=x.device) < ends[:, None]).unsqueeze(-1)


def reference(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    phases: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The upstream chain, and the moments of its result by chunk."""
    y = from_phases(x, frames, phases)
    for term in (bias, residual):
        y = y if term is None else y + term
    y = torch.where(valid_frames(y, lengths), y, 0.0).contiguous()
    return y, moments_reference(y, lengths, frames, 1)


def moments_reference(x: torch.Tensor, lengths: torch.Tensor | None, frames: int, phases: int) -> torch.Tensor:
    """The moments of the first ``frames`` frames of x by chunk, in fp32 (fp64 for x in fp64)."""
    x = from_phases(x, frames, phases).to(torch.promote_types(x.dtype, torch.float32))
    valid = valid_frames(x, lengths)
    parts = [x.new_zeros(x.shape[0], 0, 2, x.shape[2])]
    for first in range(0, frames, chunk_frames(frames)):
        part, known = (tensor[:, first : first + chunk_frames(frames)] for tensor in (x, valid))
        mean = torch.where(known, part, 0.0).sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=1)
        m2 = torch.where(known, part - mean, 0.0).square().sum(1, keepdim=True)
        parts.append(torch.cat([mean, m2], dim=1).unsqueeze(1))
    return torch.cat(parts, dim=1)


def empty_moments(x: torch.Tensor, frames: int) -> torch.Tensor:
    """Uninitialised moments of the first ``frames`` frames of x [rows, frames, channels]."""
    rows, _, channels = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty((rows, triton.cdiv(frames, chunk_frames(frames)), 2, channels), dtype=dtype, device=x.device)


def _launch(
    x: torch.Tensor,
    y: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    phases: int,
) -> torch.Tensor:
    moments = empty_moments(x, frames)
    rows, chunks, _, channels = moments.shape
    channels_first = x.stride(1) == 1 and x.stride(2) != 1  # its tiles are transposed: half as many registers
    if moments.numel():
        launch(
            _moments_kernel,
            rows * chunks * triton.cdiv(channels, BLOCK_CHANNELS),
            (x, y, moments, bias, residual, lengths),
            (
                *(channels, frames, chunk_frames(frames), chunks, x.shape[1] // phases),
                *x.stride(),
                *((0, 0, 0) if residual is None else residual.stride()),
            ),
            (),
            (phases, BLOCK_FRAMES // (2 if channels_first else 1), BLOCK_CHANNELS),
            OPTIONS,
        )
    return moments


@fused_op(
    "moments",
    "(Tensor x, Tensor? lengths, int frames, int phases) -> Tensor",
    reference=moments_reference,
    unsupported=lambda x, lengths, frames, phases: unsupported(x, None, None, lengths, frames, phases),
    fake=lambda x, lengths, frames, phases: empty_moments(x, frames),
)
def moments(x: torch.Tensor, lengths: torch.Tensor | None, frames: int, phases: int) -> torch.Tensor:
    """The moments of the first ``frames`` frames of x; x is only read."""
    return _launch(x, None, None, None, lengths, frames, phases)


@fused_op(
    "residual_moments",
    "(Tensor x, Tensor? bias, Tensor? residual, Tensor? lengths, int frames, int phases) -> (Tensor, Tensor)",
    reference=reference,
    unsupported=unsupported,
    fake=lambda x, bias, residual, lengths, frames, phases: (
        x.new_empty(x.shape[0], frames, x.shape[2]),
        empty_moments(x, frames),
    ),
)
def residual_moments(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    phases: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and its moments; shapes and formula in the module's docstring."""
    y = torch.empty((x.shape[0], frames, x.shape[2]), dtype=x.dtype, device=x.device)
    return y, _launch(x, y, bias, residual, lengths, frames, phases)
