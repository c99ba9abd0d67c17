"""Harmonic source of a neural source-filter vocoder: y = tanh(Σ_k w_k · s_k + bias), k = 1 … harmonics, where

    s_k[t] = voiced[t] · amplitude · sin(2 pi · φ_k[t]) + noise_gain[t] · noise[t, k]

Layouts: f0 in Hz, either [rows, frames], held for ``scale`` samples each (upstream's nearest upsampling, not
materialised), or [rows, samples], samples = frames · scale; initial [rows, harmonics], upstream's random phases; noise
[rows, samples, harmonics], standard normal; weight [1, harmonics]; bias [1]; y [rows, samples]. voiced is
f0 > threshold; noise_gain is noise_std where voiced, amplitude / 3 elsewhere. ``lengths`` [rows] in frames: each row
ends (and holds its last phase) at its own; y is zero behind.
Phase, in turns: upstream takes ρ = (k · f0 / rate) mod 1 at every sample, interpolates it linearly down by ``scale``,
sums the frames, multiplies by ``scale`` and interpolates linearly up. The samples met on the way down are the two (for
odd scales: the one) in the middle of a frame, so the sum is over frames. Upstream adds ``initial`` to ρ of sample 0,
which is no frame's middle where scale >= 3: it changes nothing, and no kernel reads it; it is an argument to keep its
draw alive under torch.compile. Between the centres of frames i and i + 1, h half-samples behind the first,
φ_k = scale · Σ_{j<=i} ρ_kj + h/2 · ρ_k(i+1).
Here φ is a 64-bit integer in units of 2^-64 turn. It wraps as a phase does, integer sums are exact in any order, and
the error (below 1e-8 turn after an hour) does not grow as fp32 sums do: after 10 s the ninth harmonic of upstream's
fp32 chain is off by 0.01 rad (sums in fp64, each rounded, as torch.cumsum on a CPU) to 0.04 rad (sequential fp32).
Contract: same-precision, against upstream's chain in fp64; the difference to eager is eager's own drift: on real
Kokoro audio 45 dB after 1.5 s and 35 dB after 14 s, as far as eager with one kind of sum is from eager with the other.
A row's result does not depend on its batch. Envelope: fp32, any strides of f0 and noise, scale >= 3, at most 16
harmonics; inference only.
Source: SourceModuleHnNSF.forward and SineGen.forward (flag_for_pulse off) in kokoro/istftnet.py; SineGen2 is the same
in cosyvoice/hifigan/generator.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import hyperbolic_tangent, sine_near_zero
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._triton import tl, triton

BLOCK_SAMPLES = 512
BLOCK_FRAMES = 512  # frames summed at a time
OPTIONS = (("num_warps", 4),)
MAX_HARMONICS = 16
MAX_ROW_ELEMENTS = 2**31 - 2**16  # offsets within a row are int32, and the last block may reach past its end


@triton.jit
def _fixed_point(turns):
    """Turns in fp64, modulo 1, as int64 in units of 2^-64."""
    return ((turns - tl.floor(turns + 0.5)) * 18446744073709551616.0).to(tl.int64)


@triton.jit
def _middle(f0_ptr, frame, valid, stride_f0t, period, SCALE: tl.constexpr, HELD: tl.constexpr):
    """Turns per sample of the fundamental, in fp64, at the two samples in the middle of a frame; 0 where not valid."""
    first = frame if HELD else frame * SCALE + (SCALE - 1) // 2
    second = frame if HELD else frame * SCALE + SCALE // 2
    a = tl.load(f0_ptr + first * stride_f0t, mask=valid, other=0.0).to(tl.float64) * period
    b = tl.load(f0_ptr + second * stride_f0t, mask=valid, other=0.0).to(tl.float64) * period
    return a, b


@triton.jit(do_not_specialize=["frames", "stride_f0r", "stride_nr", "stride_nk"])
def _sine_source_kernel(
    f0_ptr, noise_ptr, weight_ptr, bias_ptr, y_ptr, lengths_ptr, initial_ptr,
    frames, stride_f0r, stride_f0t, stride_nr, stride_nt, stride_nk,
    sampling_rate, amplitude, noise_std, unvoiced_noise, threshold,
    SCALE: tl.constexpr, HELD: tl.constexpr, HARMONICS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program a (row, BLOCK_T samples): it sums the frames before its first sample, then goes on by sample. With
    initial phases it is stepped (stepped_source.py): ``frame`` is then the last that is over at a sample, -1 for none.
    """
    blocks = tl.cdiv(frames * SCALE, BLOCK_T)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * BLOCK_T
    length = frames if lengths_ptr is None else tl.load(lengths_ptr + row).to(tl.int32)
    period = tl.full([], 1.0, tl.float64) / sampling_rate
    f0_ptr += row * stride_f0r
    t = start + tl.arange(0, BLOCK_T)
    valid = t < length * SCALE

    if initial_ptr is None:
        half_samples = tl.maximum(2 * t + 1 - SCALE, 0)  # behind the centre of frame 0
        frame = tl.minimum(half_samples // (2 * SCALE), length - 1)
        rest = tl.where(frame < length - 1, half_samples - 2 * SCALE * frame, 0)
        first = tl.minimum(tl.maximum(2 * start + 1 - SCALE, 0) // (2 * SCALE), length - 1)
    else:
        frame = tl.minimum(t // SCALE, length) - 1
        rest = 2 * (t % SCALE + 1)  # half samples of the next frame
        first = tl.minimum(start // SCALE, length) - 1
    sums = tl.zeros([BLOCK_F], tl.int64)
    for block in range(0, first + 1, BLOCK_F):
        j = block + tl.arange(0, BLOCK_F)
        a, b = _middle(f0_ptr, j, j <= first, stride_f0t, period, SCALE, HELD)
        sums += _fixed_point(0.5 * (a + b))
    phase = tl.sum(sums, axis=0) + tl.zeros([BLOCK_T], tl.int64)
    for ahead in range(1, BLOCK_T // SCALE + 2):
        a, b = _middle(f0_ptr, first + ahead, first + ahead < length, stride_f0t, period, SCALE, HELD)
        phase += tl.where(first + ahead <= frame, _fixed_point(0.5 * (a + b)), 0)
    phase *= SCALE

    a, b = _middle(f0_ptr, frame + 1, frame < length - 1, stride_f0t, period, SCALE, HELD)
    step_a = _fixed_point(a)
    step_b = _fixed_point(b)
    f0 = tl.load(f0_ptr + (t // SCALE if HELD else t) * stride_f0t, mask=valid, other=0.0)  # [BLOCK_T]
    voiced = f0 > threshold
    noise_gain = tl.where(voiced, noise_std, unvoiced_noise)
    source = noise_ptr + row * stride_nr + t * stride_nt
    merged = tl.zeros([BLOCK_T], tl.float32) + tl.load(bias_ptr)
    for k in tl.static_range(1, HARMONICS + 1):
        # half of the mean of both ρ, which lie in [0, 1): unsigned shifts
        step = ((step_a * k).to(tl.uint64, bitcast=True) >> 2) + ((step_b * k).to(tl.uint64, bitcast=True) >> 2)
        turns = phase * k + rest * step.to(tl.int64, bitcast=True)
        if initial_ptr is not None:
            turns += _fixed_point(tl.load(initial_ptr + row * HARMONICS + (k - 1)).to(tl.float64))
        turn = (turns >> 32).to(tl.int32)  # in units of 2^-32
        turn = tl.where((turn >= 1 << 30) | (turn < -(1 << 30)), -(1 << 31) - turn, turn)  # sin(pi − x) = sin(x)
        sine = sine_near_zero(turn.to(tl.float32) * 1.4629180792671596e-09)  # 2 pi / 2^32
        noise = tl.load(source + (k - 1) * stride_nk, mask=valid, other=0.0)  # [BLOCK_T]
        value = tl.where(voiced, sine * amplitude, 0.0) + noise_gain * noise
        merged += value * tl.load(weight_ptr + (k - 1))
    y = tl.where(valid, hyperbolic_tangent(merged), 0.0)
    tl.store(y_ptr + row * frames * SCALE + t, y, mask=t < frames * SCALE)


def unsupported(
    f0: torch.Tensor,
    initial: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    sampling_rate: float,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    tensors = f0, initial, noise, weight, bias
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        return f"dtypes must be fp32, got {', '.join(str(tensor.dtype) for tensor in tensors)}"
    if f0.dim() != 2 or noise.dim() != 3:
        return (
            f"f0 must be [rows, frames] and noise [rows, samples, harmonics], got {f0.dim()}, {noise.dim()} dimensions"
        )
    if scale < 3:
        return f"scale must be at least 3, got {scale}: below, upstream's random phases reach the sum"
    rows, samples, harmonics = noise.shape
    if f0.shape[0] != rows or samples % scale or f0.shape[1] not in (samples, samples // scale):
        return f"f0 must be [{rows}, {samples}] or that divided by the scale {scale}, got {tuple(f0.shape)}"
    if harmonics > MAX_HARMONICS or weight.numel() != harmonics or bias.numel() != 1:
        return (
            f"weight and bias must have {harmonics} (at most {MAX_HARMONICS}) and 1 elements, "
            f"got {weight.numel()} and {bias.numel()}"
        )
    if not weight.is_contiguous():
        return f"weight must be contiguous, got strides {weight.stride()}"
    # 2 · samples is computed too
    span = samples * noise.stride(1) + harmonics * noise.stride(2)
    if max(2 * samples, span, f0.shape[1] * f0.stride(1)) >= MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^30 samples or 2^31 elements, got {samples} at strides {noise.stride()}"
    if lengths is not None and (lengths.shape != (rows,) or not lengths.is_contiguous()):
        return f"lengths must be contiguous [{rows}], got {tuple(lengths.shape)}"
    return None


def reference(
    f0: torch.Tensor,
    initial: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    sampling_rate: float,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    """The upstream chain; with ``lengths``, row by row on the row's valid frames."""
    settings = scale, sampling_rate, amplitude, noise_std, threshold
    samples, harmonics = noise.shape[1:]
    if lengths is not None:
        y = fake(f0, initial, noise, weight, bias, lengths, *settings).zero_()
        for row, length in enumerate(lengths.tolist()):
            if length > 0:
                one, end = slice(row, row + 1), length * scale
                row_f0 = f0[one, : end if f0.shape[1] == samples else length]
                y[one, :end] = reference(row_f0, initial[one], noise[one, :end], weight, bias, None, *settings)
        return y
    if f0.shape[1] != samples:
        f0 = F.interpolate(f0[:, None], scale_factor=float(scale))[:, 0]
    f0 = f0.unsqueeze(-1)  # [rows, samples, 1]
    radians = (f0 * torch.arange(1, harmonics + 1, device=f0.device).to(f0.dtype) / sampling_rate) % 1
    radians[:, 0, 1:] += initial[:, 1:]  # the fundamental has none
    radians = F.interpolate(radians.transpose(1, 2), scale_factor=1 / scale, mode="linear").transpose(1, 2)
    phase = torch.cumsum(radians, dim=1) * 2 * torch.pi
    phase = F.interpolate(phase.transpose(1, 2) * scale, scale_factor=float(scale), mode="linear").transpose(1, 2)
    sines = torch.sin(phase) * amplitude
    return merged(sines, f0, noise, weight, bias, amplitude, noise_std, threshold)


def merged(
    sines: torch.Tensor,
    f0: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    """Upstream's chain behind the sines [rows, samples, harmonics], for f0 [rows, samples, 1], to the source."""
    voiced = (f0 > threshold).to(f0.dtype)
    noise_gain = voiced * noise_std + (1 - voiced) * amplitude / 3
    return torch.tanh(F.linear(sines * voiced + noise_gain * noise, weight, bias)).squeeze(-1)


def zero_tail(y: torch.Tensor, lengths: torch.Tensor | None, scale: int) -> torch.Tensor:
    """y [rows, samples], zero behind ``lengths`` frames of ``scale`` samples."""
    if lengths is None:
        return y
    return torch.where(torch.arange(y.shape[1], device=y.device) < lengths[:, None] * scale, y, 0.0)


def fake(
    f0: torch.Tensor,
    initial: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    sampling_rate: float,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    return noise.new_empty(noise.shape[:2])


@fused_op(
    "sine_source",
    "(Tensor f0, Tensor initial, Tensor noise, Tensor weight, Tensor bias, Tensor? lengths, int scale,"
    " float sampling_rate, float amplitude, float noise_std, float threshold) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=fake,
)
def sine_source(
    f0: torch.Tensor,
    initial: torch.Tensor,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    sampling_rate: float,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    """Source signal [rows, samples] of f0 and noise; shapes and formula in the module's docstring."""
    return launch_source(f0, None, noise, weight, bias, lengths, scale, sampling_rate, amplitude, noise_std, threshold)


def launch_source(
    f0: torch.Tensor,
    initial: torch.Tensor | None,
    noise: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    lengths: torch.Tensor | None,
    scale: int,
    sampling_rate: float,
    amplitude: float,
    noise_std: float,
    threshold: float,
) -> torch.Tensor:
    """Launch the kernel, interpolated without ``initial`` phases and stepped with them."""
    rows, samples, harmonics = noise.shape
    y = noise.new_empty((rows, samples))
    if y.numel() == 0:
        return y
    launch(
        _sine_source_kernel,
        rows * triton.cdiv(samples, BLOCK_SAMPLES),
        (f0, noise, weight, bias, y, lengths, initial),
        (samples // scale, *f0.stride(), *noise.stride()),
        (sampling_rate, amplitude, noise_std, amplitude / 3, threshold),
        (scale, f0.shape[1] != samples, harmonics, BLOCK_SAMPLES, BLOCK_FRAMES),
        OPTIONS,
    )
    return y
