"""Short-time Fourier transform for small n_fft, X = stft(x): ``stft_polar`` as magnitude and phase, cat([|X|, arg X],
dim=1); ``stft_complex`` as real and imaginary parts, cat([Re X, Im X], dim=1).

Layouts: x [rows, samples]; window [n_fft]; result [rows, 2·bins, frames], bins = n_fft / 2 + 1, the first half first,
frames = samples // hop + 1. Frames are centred (frame f around sample f·hop) and the row is reflected at its ends.
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

from voxfuse.kernels._dft import MAX_ROW_ELEMENTS, framing_fault, twiddles
from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import magnitude_angle
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._triton import tl, triton

BLOCK_FRAMES = 128
OPTIONS = (("num_warps", 4),)


@triton.jit(do_not_specialize=["samples", "frames", "stride_xr"])
@no_type_check  # mypy takes a tuple that grows for an error
def _stft_kernel(
    x_ptr, window_ptr, y_ptr, lengths_ptr,
    samples, frames, stride_xr, stride_xt,
    N_FFT: tl.constexpr, HOP: tl.constexpr, COS: tl.constexpr, SIN: tl.constexpr, POLAR: tl.constexpr,
    BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One program a (row, BLOCK_F frames); every lane transforms one frame, its windowed samples in registers."""
    HALF: tl.constexpr = N_FFT // 2
    blocks = tl.cdiv(frames, BLOCK_F)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    f = (tl.program_id(0) % blocks) * BLOCK_F + tl.arange(0, BLOCK_F)
    length = samples if lengths_ptr is None else tl.load(lengths_ptr + row).to(tl.int32)
    valid = (f < length // HOP + 1) & (length > HALF)
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
    target = y_ptr + row * (2 * HALF + 2) * frames + f
    for k in tl.static_range(HALF + 1):
        real = v[0] + v[HALF] * COS[(k * HALF) % N_FFT]
        imaginary = tl.zeros([BLOCK_F], tl.float64)
        for n in tl.static_range(1, HALF):
            if COS[(k * n) % N_FFT] != 0.0:
                real += even[n - 1] * COS[(k * n) % N_FFT]
            if SIN[(k * n) % N_FFT] != 0.0:
                imaginary += odd[n - 1] * SIN[(k * n) % N_FFT]
        first, second = real.to(tl.float32), imaginary.to(tl.float32)
        if POLAR:
            first, second = magnitude_angle(first, second)
        tl.store(target + k * frames, tl.where(valid, first, 0.0), mask=f < frames)
        tl.store(target + (HALF + 1 + k) * frames, tl.where(valid, second, 0.0), mask=f < frames)


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


def complex_reference(x: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int) -> torch.Tensor:
    """The upstream chain to real and imaginary parts; with ``lengths``, row by row on the row's valid samples."""
    return _by_row(_parts, x, window, lengths, hop)


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
    return _launch(x, window, lengths, hop, True)


@fused_op(
    "stft_complex",
    "(Tensor x, Tensor window, Tensor? lengths, int hop) -> Tensor",
    reference=complex_reference,
    unsupported=unsupported,
    fake=_fake,
)
def stft_complex(x: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int) -> torch.Tensor:
    """Real and imaginary parts of x [rows, samples]; shapes and formula in the module's docstring."""
    return _launch(x, window, lengths, hop, False)


def _launch(x: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int, polar: bool) -> torch.Tensor:
    rows, samples = x.shape
    y = _fake(x, window, lengths, hop)
    frames = y.shape[2]
    if y.numel() == 0:
        return y
    n_fft = window.numel()
    launch(
        _stft_kernel,
        rows * triton.cdiv(frames, BLOCK_FRAMES),
        (x, window, y, lengths),
        (samples, frames, *x.stride()),
        (),
        (n_fft, hop, *twiddles(n_fft), polar, BLOCK_FRAMES),
        OPTIONS,
    )
    return y
