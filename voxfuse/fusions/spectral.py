"""Short-time spectra as magnitude and phase (Kokoro's TorchSTFT), each way one kernel without complex tensors.

The functions take the module as upstream built it. Its window, there a plain CPU tensor that is sent to the GPU at
every call, is kept on the device beside the module. Source: TorchSTFT in kokoro/istftnet.py.
"""

from __future__ import annotations

from typing import Any

import torch

from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels.istft import istft_polar
from voxfuse.kernels.stft import stft_polar
from voxfuse.records import Fusion, FusionPattern

STFT_POLAR = Fusion(
    name="stft_polar",
    stacks=("kokoro",),
    operations=("stft", "abs", "angle"),
    contract="same-precision",
    envelope="fp32 [rows, samples], n_fft up to 32, a multiple of twice the hop; inference only",
    kernels=("stft",),
    patterns=(FusionPattern(operations=("stft", "abs", "angle")),),
)
ISTFT_POLAR = Fusion(
    name="istft_polar",
    stacks=("kokoro",),
    operations=("exp", "mul", "istft"),
    contract="same-precision",
    envelope="fp32 [rows, bins, frames], n_fft up to 32, a multiple of twice the hop; inference only",
    kernels=("istft",),
    patterns=(FusionPattern(operations=("mul", "exp", "mul", "istft")),),
)


def unsupported(stft: Any) -> str | None:
    """Why a module (``filter_length``, ``hop_length``, ``win_length``, ``window``) cannot be fused, or None.

    torch.istft refuses a window whose squares leave a sample uncovered; here that is asked of it once a window.
    """
    n_fft, hop = stft.filter_length, stft.hop_length
    if stft.win_length != n_fft:
        return f"the window must be as long as n_fft, got {stft.win_length} and {n_fft}"
    if torch.compiler.is_compiling():
        return None
    return pack(stft, f"fault at hop {hop}", [stft.window], lambda: window_fault(stft.window, hop))


def window_fault(window: torch.Tensor, hop: int) -> str | None:
    """Why torch.istft refuses a window at some number of frames, or None. Waits for the window's device."""
    n_fft = window.numel()
    try:
        for frames in range(2, n_fft // hop + 2):
            silence = window.new_zeros((n_fft // 2 + 1, frames), dtype=torch.complex64)
            torch.istft(silence, n_fft, hop, n_fft, window=window)
    except RuntimeError as error:
        return f"torch.istft refuses the window: {str(error).splitlines()[0]}"
    return None


def window_on(stft: Any, device: torch.device) -> torch.Tensor:
    return pack(stft, f"window on {device}", [stft.window], lambda: stft.window.to(device))


def magnitude_and_phase(stft: Any, x: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """TorchSTFT.transform of x [rows, samples]: two [rows, bins, frames], halves of one tensor."""
    magnitude, phase = stft_polar(x, window_on(stft, x.device), None, stft.hop_length, run=run).chunk(2, dim=1)
    return magnitude, phase


def waveform(stft: Any, magnitude: torch.Tensor, phase: torch.Tensor, run: Run) -> torch.Tensor:
    """TorchSTFT.inverse of magnitude and phase [rows, bins, frames]: [rows, 1, samples]."""
    window = window_on(stft, magnitude.device)
    return istft_polar(magnitude, phase, window, None, stft.hop_length, "polar", run=run).unsqueeze(-2)
