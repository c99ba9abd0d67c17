"""Short-time Fourier transform for small n_fft, X = stft(x): ``stft_polar`` as magnitude and phase, cat([|X|, arg X],
dim=1); ``stft_complex`` as real and imaginary parts, channels last, as strided convolutions read them.

Layouts: x [rows, samples]; window [n_fft]; result of ``stft_polar`` [rows, 2·bins, frames], bins = n_fft / 2 + 1, the
first half first, frames = samples // hop + 1; of ``stft_complex`` [rows, held, channels] with frame f at lead + f, real
parts, imaginary parts, and zeros up to ``channels`` and around the frames. Frames are centred (frame f around sample
f·hop) and the row is reflected at its ends.
``lengths`` [rows] in samples: each row is reflected at its own valid length, and frames behind the
``length // hop + 1`` valid ones are zero; a row of at most n_fft / 2 samples has no reflection (upstream refuses it)
and no valid frame.
Contract: same-precision, on the magnitude and on the phase, or on the parts together. The transform is a direct sum in
fp64, so that the sign of an imaginary part far below the fp32 rounding of the sum is right too: frame 0 is its own
mirror image, up to the last bit of the fp32 window, and has phases of 0 and ±pi by that sign. Bins 0 and n_fft / 2 have
an imaginary part of +0, as torch.stft gives them on CPU: phase 0 or +pi. A bin of exact zeros has phase 0.
A row's result does not depend on its batch. Envelope: fp32, any strides, n_fft <= 32 and a multiple of 2·hop, window as
long as n_fft; inference only. No complex tensor, no host sync.
Source: TorchSTFT.transform in kokoro/istftnet.py: torch.stft(center=True, pad_mode="reflect"), torch.abs, torch.angle;
HiFTGenerator._stft and the cat behind it in cosyvoice/hifigan/generator.py.
"""

# ruff: noqa: RUF005 - the kernel language has no starred tuples
from __future__ import annotations

from collections.abc import Callable
from typing import no_type_check

import torch
import torch.nn.functional as F

from voxfuse.kernels._dft import MAX_ROW_ELEMENTS, framing_fault, twiddles
from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import magnitude_angle
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rows import power_of_two
from voxfuse.kernels._triton import tl, triton

BLOCK_FRAMES = 128
OPTIONS = (("num_warps", 4),)


@triton.jit
@no_type_check
def _side_by_side(parts, WIDTH: tl.constexpr, BLOCK_F: tl.constexpr):
    """WIDTH tensors [BLOCK_F] → [BLOCK_F, WIDTH], WIDTH a power of two: what a lane holds stays with it."""
    for level in tl.static_range(5):
        if (WIDTH >> level) > 1:
            joined = ()
            for i in tl.static_range(WIDTH >> (level + 1)):
                joined = joined + (tl.join(parts[i], parts[i + (WIDTH >> (level + 1))]),)
            parts = joined
    return tl.reshape(parts[0], [BLOCK_F, WIDTH])


@triton.jit(do_not_specialize=["samples", "frames", "lead", "held", "channels", "stride_xr"])
@no_type_check  # mypy takes a tuple that grows for an error
def _stft_kernel(
    x_ptr, window_ptr, y_ptr, lengths_ptr,
    samples, frames, lead, held, channels, stride_xr, stride_xt,
    N_FFT: tl.constexpr, HOP: tl.constexpr, COS: tl.constexpr, SIN: tl.constexpr, POLAR: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program a (row, BLOCK_F frames); every lane transforms one frame, its windowed samples in registers.
    Channels last (not POLAR), frames below 0 are the ``lead`` zeros in front, and WIDTH holds all ``channels``."""
    HALF: tl.constexpr = N_FFT // 2
    blocks = tl.cdiv(held, BLOCK_F)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    position = (tl.program_id(0) % blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    f = position - lead
    length = samples if lengths_ptr is None else tl.load(lengths_ptr + row).to(tl.int32)
    valid = (f >= 0) & (f < length // HOP + 1) & (length > HALF)
    source = x_ptr + row * stride_xr
    v = ()
    for n in tl.static_range(N_FFT):
        i = tl.abs(f * HOP + (n - HALF))
        i = tl.where(i < length, i, 2 * (length - 1) - i)
        x = tl.load(source + i * stride_xt, mask=valid, other=0.0)  # [BLOCK_F]
        v = v + (x.to(tl.float64) * tl.load(window_ptr + n).to(tl.float64),)
    even = ()
    odd = ()
    for n in tl.static_range(1, HALF):
        even = even + (v[n] + v[N_FFT - n],)
        odd = odd + (v[N_FFT - n] - v[n],)
    reals = ()
    imaginaries = ()
    for k in tl.static_range(HALF + 1):
        real = v[0] + v[HALF] * COS[(k * HALF) % N_FFT]
        imaginary = tl.zeros([BLOCK_F], tl.float64)
        for n in tl.static_range(1, HALF):
            if COS[(k * n) % N_FFT] != 0.0:
                real += even[n - 1] * COS[(k * n) % N_FFT]
            if SIN[(k * n) % N_FFT] != 0.0:
                imaginary += odd[n - 1] * SIN[(k * n) % N_FFT]
        reals = reals + (tl.where(valid, real.to(tl.float32), 0.0),)
        imaginaries = imaginaries + (tl.where(valid, imaginary.to(tl.float32), 0.0),)
    if POLAR:
        target = y_ptr + row * (2 * HALF + 2) * frames + f
        for k in tl.static_range(HALF + 1):
            magnitude, angle = magnitude_angle(reals[k], imaginaries[k])
            tl.store(target + k * frames, tl.where(valid, magnitude, 0.0), mask=f < frames)
            tl.store(target + (HALF + 1 + k) * frames, tl.where(valid, angle, 0.0), mask=f < frames)
    else:
        parts = reals + imaginaries
        for _ in tl.static_range(WIDTH - 2 * (HALF + 1)):
            parts = parts + (tl.zeros([BLOCK_F], tl.float32),)
        channel = tl.arange(0, WIDTH)[None, :]
        y = _side_by_side(parts, WIDTH, BLOCK_F)  # [BLOCK_F, WIDTH]
        target = y_ptr + row * held * channels + position[:, None] * channels + channel
        tl.store(target, y, mask=(position < held)[:, None] & (channel < channels))


def unsupported(x: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int) -> str | None:
    """Why a call is outside the envelope, or None."""
    if x.dim() != 2:
        return f"x must be [rows, samples], got {x.dim()} dimensions"
    if x.dtype != torch.float32:
        return f"x must be fp32, got {x.dtype}"
    rows, samples = x.shape
    if samples <= window.numel() // 2:
        return f"reflection needs more than n_fft / 2 samples, got {samples}: upstream refuses it too"
    if max(samples * max(x.stride(1), 1), (samples // max(hop, 1) + 1) * (window.numel() + 2)) >= MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^31 elements, got {samples} samples at stride {x.stride(1)}"
    return framing_fault(window, lengths, rows, hop)


def reference(x: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int) -> torch.Tensor:
    """The upstream chain to magnitude and phase; with ``lengths``, row by row on the row's valid samples."""
    return _by_row(_polar, x, window, lengths, hop)


def _complex_unsupported(
    x: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    lead: int,
    held: int,
    channels: int,
) -> str | None:
    if (reason := unsupported(x, window, lengths, hop)) is not None:
        return reason
    parts, frames = window.numel() + 2, x.shape[1] // hop + 1
    if lead < 0 or held < lead + frames or not parts <= channels <= power_of_two(parts):
        most = power_of_two(parts)
        return f"expected room for {frames} frames and {parts} to {most} channels, got {(lead, held, channels)}"
    return (
        None if held * channels < MAX_ROW_ELEMENTS else f"a row must have fewer than 2^31 elements, got {held} frames"
    )


def complex_reference(
    x: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    lead: int,
    held: int,
    channels: int,
) -> torch.Tensor:
    """The upstream chain to real and imaginary parts, with ``lengths`` row by row on the row's valid samples; then
    channels last, and the zeros around."""
    y = _by_row(_parts, x, window, lengths, hop).transpose(1, 2)
    return F.pad(y, (0, channels - y.shape[2], lead, held - lead - y.shape[1])).contiguous()


def _by_row(
    of_spectrum: Callable[[torch.Tensor], list[torch.Tensor]],
    x: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
) -> torch.Tensor:
    n_fft = window.numel()
    if lengths is not None:
        y = _fake(x, window, lengths, hop).zero_()
        for row, length in enumerate(lengths.tolist()):
            if length > n_fft // 2:
                one = _by_row(of_spectrum, x[row : row + 1, :length], window, None, hop)
                y[row : row + 1, :, : length // hop + 1] = one
        return y
    spectrum = torch.stft(x, n_fft, hop, n_fft, window=window, return_complex=True)
    return torch.cat(of_spectrum(spectrum), dim=1)


def _polar(spectrum: torch.Tensor) -> list[torch.Tensor]:
    return [torch.abs(spectrum), torch.angle(spectrum)]


def _parts(spectrum: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.view_as_real(spectrum).unbind(-1))


def _fake(x: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], 2 * (window.shape[0] // 2 + 1), x.shape[1] // hop + 1))


@fused_op(
    "stft_polar",
    "(Tensor x, Tensor window, Tensor? lengths, int hop) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def stft_polar(x: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int) -> torch.Tensor:
    """Magnitude and phase of x [rows, samples]; shapes and formula in the module's docstring."""
    return _launch(x, window, lengths, hop, _fake(x, window, lengths, hop), None)


def _complex_fake(
    x: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    lead: int,
    held: int,
    channels: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], held, channels))


@fused_op(
    "stft_complex",
    "(Tensor x, Tensor window, Tensor? lengths, int hop, int lead, int held, int channels) -> Tensor",
    reference=complex_reference,
    unsupported=_complex_unsupported,
    fake=_complex_fake,
)
def stft_complex(
    x: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    lead: int,
    held: int,
    channels: int,
) -> torch.Tensor:
    """Real and imaginary parts of x [rows, samples]; shapes and formula in the module's docstring."""
    y = _complex_fake(x, window, lengths, hop, lead, held, channels)
    return _launch(x, window, lengths, hop, y, (lead, held, channels))


def _launch(
    x: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    y: torch.Tensor,
    room: tuple[int, int, int] | None,
) -> torch.Tensor:
    """Fill y: polar, or of ``lead, held, channels`` the complex parts."""
    rows, samples = x.shape
    if y.numel() == 0:
        return y
    n_fft, frames = window.numel(), samples // hop + 1
    lead, held, channels = room or (0, frames, n_fft + 2)
    launch(
        _stft_kernel,
        rows * triton.cdiv(held, BLOCK_FRAMES),
        (x, window, y, lengths),
        (samples, frames, lead, held, channels, *x.stride()),
        (),
        (n_fft, hop, *twiddles(n_fft), room is None, power_of_two(n_fft + 2), BLOCK_FRAMES),
        OPTIONS,
    )
    return y
