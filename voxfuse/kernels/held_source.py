"""Harmonic source whose sines are constant within a frame (CosyVoice3): y = tanh(Σ_k w_k · s_k + bias), where

    s_k[t] = voiced[t] · amplitude · sines[t div scale, k] + noise_gain[t] · noise[t, k]

Layouts: sines [rows, frames, harmonics], f0 in Hz, either [rows, frames], held for ``scale`` samples each, or [rows,
samples], samples = frames · scale; noise [rows, samples, harmonics], of a row stride of 0 where all rows have the same;
weight [1, harmonics]; bias [1]; y [rows, samples]. voiced is f0 > threshold; noise_gain is noise_std where voiced,
amplitude / 3 elsewhere. ``lengths`` [rows] in frames: y is zero behind.
The causal SineGen2 interpolates its phase by "nearest", so a sine at each frame is all there is: upstream makes them
for every sample, 480 times over (the caller makes them with upstream's operations, to the bit).
Contract: same-precision; the sum over harmonics goes from the first to the last.
Envelope: fp32, any strides of sines, f0 and noise, at most 16 harmonics; inference only.
Source: SineGen2.forward (causal) and SourceModuleHnNSF.forward in cosyvoice/hifigan/generator.py.
"""

from __future__ import annotations

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import hyperbolic_tangent
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels.sine_source import MAX_HARMONICS, MAX_ROW_ELEMENTS, merged, zero_tail

BLOCK_SAMPLES = 512
OPTIONS = (("num_warps", 4),)


@triton.jit(do_not_specialize=["frames", "stride_sr", "stride_sk", "stride_f0r", "stride_nr"])
def _held_source_kernel(
    sines_ptr, f0_ptr, noise_ptr, weight_ptr, bias_ptr, y_ptr, lengths_ptr,
    frames, stride_sr, stride_st, stride_sk, stride_f0r, stride_f0t, stride_nr, stride_nt, stride_nk,
    amplitude, noise_std, unvoiced_noise, threshold,
    SCALE: tl.constexpr, HELD: tl.constexpr, HARMONICS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program a (row, BLOCK_T samples)."""
    blocks = tl.cdiv(frames * SCALE, BLOCK_T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    t = (tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    length = frames if lengths_ptr is None else tl.load(lengths_ptr + row).to(tl.int32)
    valid = t < length * SCALE
    frame = t // SCALE
    f0 = tl.load(f0_ptr + row * stride_f0r + (frame if HELD else t) * stride_f0t, mask=valid, other=0.0)  # [BLOCK_T]
    voiced = f0 > threshold
    noise_gain = tl.where(voiced, noise_std, unvoiced_noise)
    sines = sines_ptr + row * stride_sr + frame * stride_st
    source = noise_ptr + row * stride_nr + t * stride_nt
    merged = tl.zeros([BLOCK_T], tl.float32) + tl.load(bias_ptr)
    for k in tl.static_range(HARMONICS):
        sine = tl.load(sines + k * stride_sk, mask=valid, other=0.0)  # [BLOCK_T]
        noise = tl.load(source + k * stride_nk, mask=valid, other=0.0)  # [BLOCK_T]
        value = tl.where(voiced, sine * amplitude, 0.0) + noise_gain * noise
        merged += value * tl.load(weight_ptr + k)
    y = tl.where(valid, hyperbolic_tangent(merged), 0.0)
    tl.store(y_ptr + row * frames * SCALE + t, y, mask=t < frames * SCALE)


def unsupported(
    sines: torch.Tensor,
    f0: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    tensors = sines, f0, noise, weight, bias
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return f"dtypes must be fp32, got {', '.join(str(tensor.dtype) for tensor in tensors)}"
    if sines.dim() != 3 or f0.dim() != 2:
        return (
            f"sines must be [rows, frames, harmonics] and f0 [rows, frames], got {sines.dim()}, {f0.dim()} dimensions"
        )
    rows, frames, harmonics = sines.shape
    if noise.shape != (rows, frames * scale, harmonics):
        return f"noise must be {[rows, frames * scale, harmonics]}, got {tuple(noise.shape)}"
    if f0.shape[0] != rows or f0.shape[1] not in (frames, frames * scale):
        return f"f0 must be [{rows}, {frames}] or that times the scale {scale}, got {tuple(f0.shape)}"
    if harmonics > MAX_HARMONICS or weight.numel() != harmonics or bias.numel() != 1 or not weight.is_contiguous():
        return f"weight and bias must have {harmonics} (at most {MAX_HARMONICS}) elements and 1, contiguous"
    spans = [tensor.shape[1] * tensor.stride(1) + harmonics * tensor.stride(2) for tensor in (sines, noise)]
    if max(frames * scale, f0.shape[1] * f0.stride(1), *spans) >= MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^31 elements, got {frames * scale} samples at strides {noise.stride()}"
    if lengths is not None and (lengths.shape != (rows,) or not lengths.is_contiguous()):
        return f"lengths must be contiguous [{rows}], got {tuple(lengths.shape)}"
    return None


def reference(
    sines: torch.Tensor,
    f0: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    """The upstream chain behind the sines; then the zero tail."""
    samples = sines.shape[1] * scale
    waves = sines.repeat_interleave(scale, 1) * amplitude
    at_samples = f0 if f0.shape[1] == samples else f0.repeat_interleave(scale, 1)
    y = merged(waves, at_samples.unsqueeze(-1), noise, weight, bias, amplitude, noise_std, threshold)
    return zero_tail(y, lengths, scale)


def _fake(
    sines: torch.Tensor,
    f0: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    return sines.new_empty(noise.shape[:2])


@fused_op(
    "held_source",
    "(Tensor sines, Tensor f0, Tensor noise, Tensor weight, Tensor bias, Tensor? lengths, int scale, float amplitude,"
    " float noise_std, float threshold) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def held_source(
    sines: torch.Tensor,
    f0: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    """Source signal [rows, samples]; shapes and formula in the module's docstring."""
    rows, frames, harmonics = sines.shape
    y = sines.new_empty((rows, frames * scale))
    if y.numel() == 0:
        return y
    launch(
        _held_source_kernel,
        rows * triton.cdiv(frames * scale, BLOCK_SAMPLES),
        (sines, f0, noise, weight, bias, y, lengths),
        (frames, *sines.stride(), *f0.stride(), *noise.stride()),
        (amplitude, noise_std, amplitude / 3, threshold),
        (scale, f0.shape[1] == frames, harmonics, BLOCK_SAMPLES),
        OPTIONS,
    )
    return y
