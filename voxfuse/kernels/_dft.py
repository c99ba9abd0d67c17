"""What the short-time transforms share: twiddle factors as compile-time constants, and their envelope."""

from __future__ import annotations

import functools
import math

import torch

MAX_N_FFT = 32  # the transforms are unrolled: n_fft² / 2 multiply-adds a frame
MAX_ROW_ELEMENTS = 2**31 - 2**16  # offsets within a row are int32, and the last block may reach past its end


@functools.cache
def twiddles(n_fft: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """cos and sin of 2 pi m / n_fft for m < n_fft, with exact zeros and ones."""

    def exact(value: float) -> float:
        return float(round(value)) if abs(value - round(value)) < 1e-12 else value

    angles = [2.0 * math.pi * m / n_fft for m in range(n_fft)]
    return tuple(exact(math.cos(a)) for a in angles), tuple(exact(math.sin(a)) for a in angles)


def framing_fault(window: torch.Tensor, lengths: torch.Tensor | None, rows: int, hop: int) -> str | None:
    """Why a window, a hop or lengths are outside what the kernels take, or None."""
    n_fft = window.numel()
    if window.dim() != 1 or window.dtype != torch.float32 or not window.is_contiguous():
        return f"window must be contiguous fp32 [n_fft], got {window.dtype} {tuple(window.shape)}"
    if n_fft > MAX_N_FFT or hop < 1 or n_fft % (2 * hop):
        return f"n_fft must be at most {MAX_N_FFT} and a multiple of twice the hop, got {n_fft} and {hop}"
    if lengths is not None and (lengths.shape != (rows,) or not lengths.is_contiguous()):
        return f"lengths must be contiguous [{rows}], got {tuple(lengths.shape)}"
    return None
