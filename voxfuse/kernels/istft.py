"""Inverse short-time Fourier transform for small n_fft, from magnitude and phase: y = istft(m · exp(i·p)).

Layouts: ``a`` and ``b`` [rows, bins, frames] each, bins = n_fft / 2 + 1; window [n_fft]; y [rows, (frames − 1)·hop].
``head`` "polar": m = a, p = b. ``head`` "exp_sin": m = exp(a), p = sin(b), the end of Kokoro's Generator.forward.
``istft_limited`` has the head "exp_sin", m at most ``max_magnitude``, and y within ±``max_sample``: HiFT's end.
Overlap-add of the windowed inverse transforms, divided by that of the squared window, n_fft / 2 samples cut off at both
ends; imaginary parts of bins 0 and n_fft / 2 count for nothing: torch.istft(center=True). ``lengths`` [rows] in frames:
only a row's valid frames are added, in the sum and in the divisor, so that its end is that of the row alone; y is zero
behind (length − 1)·hop samples.
Contract: same-precision. Exponential and sines in fp32, sums in fp64 in a fixed order: a row's result does not depend
on its batch. torch.istft raises where the divisor is not above 1e-11, for which it waits for the GPU: here the caller
checks the window once.
Envelope: fp32, any strides, n_fft <= 32 and a multiple of 2·hop, window as long as n_fft; inference only. No complex
tensor, no host sync.
Source: TorchSTFT.inverse and the end of Generator.forward in kokoro/istftnet.py; HiFTGenerator._istft and the end of
HiFTGenerator.decode in cosyvoice/hifigan/generator.py.
"""

# ruff: noqa: RUF005 - the kernel language has no starred tuples
from __future__ import annotations

import math
from typing import no_type_check

import torch

from voxfuse.kernels._dft import MAX_ROW_ELEMENTS, framing_fault, twiddles
from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import exponential, sine, sine_cosine
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._triton import tl, triton

BLOCK_HOPS = 128
OPTIONS = (("num_warps", 4),)
HEADS = ("polar", "exp_sin")


@triton.jit(do_not_specialize=["frames", "stride_ar", "stride_ak", "stride_br", "stride_bk"])
@no_type_check  # mypy takes a tuple that grows for an error
def _istft_kernel(
    a_ptr, b_ptr, window_ptr, y_ptr, lengths_ptr,
    frames, stride_ar, stride_ak, stride_af, stride_br, stride_bk, stride_bf, max_magnitude, max_sample,
    N_FFT: tl.constexpr, HOP: tl.constexpr, COS: tl.constexpr, SIN: tl.constexpr, EXP_SIN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One program a (row, BLOCK_H hops of output); every lane gathers one hop from the n_fft / hop frames over it."""
    HALF: tl.constexpr = N_FFT // 2
    blocks = tl.cdiv(frames - 1, BLOCK_H)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    h = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    length = frames if lengths_ptr is None else tl.load(lengths_ptr + row).to(tl.int32)
    total = ()
    divisor = ()
    for _ in tl.static_range(HOP):
        total = total + (tl.zeros([BLOCK_H], tl.float64),)
        divisor = divisor + (tl.zeros([BLOCK_H], tl.float64),)
    for d in tl.static_range(N_FFT // HOP):
        f = h + (HALF // HOP - d)
        valid = (f >= 0) & (f < length)
        real = ()
        imaginary = ()
        for k in tl.static_range(HALF + 1):
            a = tl.load(a_ptr + row * stride_ar + k * stride_ak + f * stride_af, mask=valid, other=0.0)  # [BLOCK_H]
            b = tl.load(b_ptr + row * stride_br + k * stride_bk + f * stride_bf, mask=valid, other=0.0)  # [BLOCK_H]
            if EXP_SIN:
                a = exponential(a)
                a = tl.where(a > max_magnitude, max_magnitude, a)  # keeps NaN, as torch.clip does
                b = sine(b)
            sin_b, cos_b = sine_cosine(b)
            real = real + ((a * cos_b).to(tl.float64),)
            imaginary = imaginary + ((a * sin_b).to(tl.float64),)
        sums = ()
        divisors = ()
        for r in tl.static_range(HOP):
            pairs = tl.zeros([BLOCK_H], tl.float64)
            for k in tl.static_range(1, HALF):
                if COS[(k * (d * HOP + r)) % N_FFT] != 0.0:
                    pairs += real[k] * COS[(k * (d * HOP + r)) % N_FFT]
                if SIN[(k * (d * HOP + r)) % N_FFT] != 0.0:
                    pairs -= imaginary[k] * SIN[(k * (d * HOP + r)) % N_FFT]
            sample = real[0] + real[HALF] * COS[(HALF * (d * HOP + r)) % N_FFT] + 2.0 * pairs
            w = tl.where(valid, tl.load(window_ptr + (d * HOP + r)), 0.0).to(tl.float64)
            sums = sums + (total[r] + w * sample,)
            divisors = divisors + (divisor[r] + w * w,)
        total = sums
        divisor = divisors
    target = y_ptr + row * (frames - 1) * HOP + h * HOP
    for r in tl.static_range(HOP):
        inside = h < length - 1
        y = tl.div_rn(total[r].to(tl.float32), tl.where(inside, (divisor[r] * N_FFT).to(tl.float32), 1.0))
        y = tl.where(y > max_sample, max_sample, tl.where(y < -max_sample, -max_sample, y))
        tl.store(target + r, tl.where(inside, y, 0.0), mask=h < frames - 1)


def unsupported(
    a: torch.Tensor, b: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int, head: str
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        return f"a and b must be fp32, got {a.dtype} and {b.dtype}"
    if a.dim() != 3 or a.shape != b.shape or a.shape[1] != window.numel() // 2 + 1:
        return f"a and b must be [rows, n_fft / 2 + 1, frames], got {tuple(a.shape)} and {tuple(b.shape)}"
    rows, _, frames = a.shape
    if frames < 2:
        return f"fewer than two frames leave no sample, got {frames}: left to upstream"
    if max(frames * hop, *(max(t.stride(1) * t.shape[1], 1) + frames * t.stride(2) for t in (a, b))) > MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^31 elements, got {frames} frames at strides {a.stride()}, {b.stride()}"
    return framing_fault(window, lengths, rows, hop)


def reference(
    a: torch.Tensor, b: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int, head: str
) -> torch.Tensor:
    """The upstream chain; with ``lengths``, row by row on its valid frames. Raises ValueError for an unknown head."""
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
    if lengths is not None:
        y = _fake(a, b, window, lengths, hop, head).zero_()
        for row, length in enumerate(lengths.tolist()):
            if length > 1:
                row_a, row_b = (t[row : row + 1, :, :length] for t in (a, b))
                y[row : row + 1, : (length - 1) * hop] = reference(row_a, row_b, window, None, hop, head)
        return y
    magnitude, phase = (torch.exp(a), torch.sin(b)) if head == "exp_sin" else (a, b)
    n_fft = window.numel()
    return torch.istft(magnitude * torch.exp(phase * 1j), n_fft, hop, n_fft, window=window)


def _fake(
    a: torch.Tensor, b: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int, head: str
) -> torch.Tensor:
    return a.new_empty((a.shape[0], (a.shape[2] - 1) * hop))


@fused_op(
    "istft_polar",
    "(Tensor a, Tensor b, Tensor window, Tensor? lengths, int hop, str head) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def istft_polar(
    a: torch.Tensor, b: torch.Tensor, window: torch.Tensor, lengths: torch.Tensor | None, hop: int, head: str
) -> torch.Tensor:
    """Samples [rows, (frames − 1)·hop] of a spectrum; shapes and formula in the module's docstring.

    Raises ValueError for a head that is neither "polar" nor "exp_sin".
    """
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, got {head!r}")
    return _launch(a, b, window, lengths, hop, head == "exp_sin", math.inf, math.inf)


def limited_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    max_magnitude: float,
    max_sample: float,
) -> torch.Tensor:
    """The upstream chain, in its order; with ``lengths``, row by row on its valid frames."""
    magnitude, phase = torch.clip(torch.exp(a), max=max_magnitude), torch.sin(b)
    return torch.clamp(reference(magnitude, phase, window, lengths, hop, "polar"), -max_sample, max_sample)


@fused_op(
    "istft_limited",
    "(Tensor a, Tensor b, Tensor window, Tensor? lengths, int hop, float max_magnitude, float max_sample) -> Tensor",
    reference=limited_reference,
    unsupported=lambda a, b, window, lengths, hop, *_: unsupported(a, b, window, lengths, hop, "exp_sin"),
    fake=lambda a, b, window, lengths, hop, *_: _fake(a, b, window, lengths, hop, "exp_sin"),
)
def istft_limited(
    a: torch.Tensor,
    b: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    max_magnitude: float,
    max_sample: float,
) -> torch.Tensor:
    """Samples [rows, (frames − 1)·hop] of a spectrum within limits; formula in the module's docstring."""
    return _launch(a, b, window, lengths, hop, True, max_magnitude, max_sample)


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    window: torch.Tensor,
    lengths: torch.Tensor | None,
    hop: int,
    exp_sin: bool,
    max_magnitude: float,
    max_sample: float,
) -> torch.Tensor:
    rows, _, frames = a.shape
    y = a.new_empty((rows, (frames - 1) * hop))
    if y.numel() == 0:
        return y
    n_fft = window.numel()
    launch(
        _istft_kernel,
        rows * triton.cdiv(frames - 1, BLOCK_HOPS),
        (a, b, window, y, lengths),
        (frames, *a.stride(), *b.stride()),
        (max_magnitude, max_sample),
        (n_fft, hop, *twiddles(n_fft), exp_sin, BLOCK_HOPS),
        OPTIONS,
    )
    return y
