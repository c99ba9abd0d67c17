"""Mel spectrograms for a vocoder without the model that would make them: of real speech, or made up.

Log-mel as CosyVoice and Chatterbox have it: 24 kHz, windows of 1920 samples every 480, 80 bands on Slaney's scale with
his normalisation, natural logarithm of the amplitude, at least 1e-5. Source: mel_spectrogram of Matcha-TTS
(matcha/utils/audio.py) and ``librosa.filters.mel``.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import torch
import torch.nn.functional as F

RATE_HZ, WINDOW, HOP, BANDS = 24_000, 1920, 480, 80
FLOOR, POWER_FLOOR = 1e-5, 1e-9
FRAMES_A_WORD, LEAD_FRAMES = 15, 10  # of made-up speech: 0.3 s a word
LINEAR_HZ, LINEAR_STEP, LOG_STEP = 1000.0, 200.0 / 3, np.log(6.4) / 27  # Slaney's scale: linear, then logarithmic


def log_mel(audio: torch.Tensor, highest_hz: float) -> torch.Tensor:
    """audio [rows, samples] at 24 kHz → [rows, 80, samples div 480]; ``highest_hz`` is the upper end of the bands."""
    edge = (WINDOW - HOP) // 2
    padded = F.pad(audio.unsqueeze(1), (edge, edge), mode="reflect").squeeze(1)
    window = torch.hann_window(WINDOW, device=audio.device)
    spectrum = torch.stft(padded, WINDOW, HOP, WINDOW, window=window, center=False, return_complex=True)
    amplitude = torch.sqrt(torch.view_as_real(spectrum).square().sum(-1) + POWER_FLOOR)
    bands = torch.from_numpy(bank(highest_hz)).to(audio.device)
    return torch.log(torch.clamp(bands @ amplitude, min=FLOOR))


@functools.cache
def bank(highest_hz: float) -> np.ndarray:
    """Triangles over the bins of the transform, float32 [80, 961], each of an area of one over its width."""
    corners = _hz(np.linspace(_mels(0.0), _mels(highest_hz), BANDS + 2))
    bins = np.linspace(0, RATE_HZ / 2, WINDOW // 2 + 1)
    rising = (bins - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - bins) / (corners[2:] - corners[1:-1])[:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * (2.0 / (corners[2:] - corners[:-2]))[:, None]).astype(np.float32)


def _mels(hz: float) -> float:
    return hz / LINEAR_STEP if hz < LINEAR_HZ else LINEAR_HZ / LINEAR_STEP + float(np.log(hz / LINEAR_HZ)) / LOG_STEP


def _hz(mels: np.ndarray) -> np.ndarray:
    knee = LINEAR_HZ / LINEAR_STEP
    return np.where(mels < knee, mels * LINEAR_STEP, LINEAR_HZ * np.exp(LOG_STEP * (np.maximum(mels, knee) - knee)))


def made_up(text: str) -> torch.Tensor:
    """[1, 80, frames] that drifts as speech does, of a length by the words of the text, always the same for a text."""
    frames = LEAD_FRAMES + FRAMES_A_WORD * max(1, len(text.split()))
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
    coarse = torch.randn(1, 1, 10, frames // 5 + 2, generator=generator)
    drift = F.interpolate(coarse, size=(BANDS, frames), mode="bicubic", align_corners=True)[:, 0]
    tilt = torch.linspace(-2.0, -7.0, BANDS)[:, None]
    return tilt + 2.0 * drift + 0.3 * torch.randn(1, BANDS, frames, generator=generator)
