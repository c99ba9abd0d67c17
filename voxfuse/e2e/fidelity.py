"""Tier 0 of the gate: how far the patched waveform is from the untouched one, both seeded alike.

Word error rate misses real faults (a wrong dilation reads at the same WER), so the samples themselves are compared:

- SNR = 10 · log10(Σ b² / Σ (p − b)²) in dB, b untouched, p patched;
- log-spectrum L1 = mean over frames and bins of abs(ln max(|P|, floor) − ln max(|B|, floor)), from a Hann window of
  1024 samples every 256, floor = 1e-4 of the largest |B| (−80 dB), so that the noise of silence does not count.

A phase drift moves the first and hardly the second; a change of timbre moves both.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch

WINDOW_SAMPLES = 1024
HOP_SAMPLES = 256
FLOOR = 1e-4
SNR_LIMIT_DB = 200.0  # beyond float32's reach: keeps the figure finite where one arm is silent


class Fidelity(NamedTuple):
    """``identical``: same samples, bit for bit. The figures are None then, and where ``reason`` forbids comparing."""

    identical: bool
    snr_db: float | None = None
    log_spectrum_l1: float | None = None
    reason: str | None = None


def audio_sha256(samples: np.ndarray) -> str:
    """SHA-256 of the samples as little-endian float32: the identity of an audio."""
    return hashlib.sha256(np.ascontiguousarray(samples, dtype="<f4").tobytes()).hexdigest()


def compare(baseline: np.ndarray, patched: np.ndarray) -> Fidelity:
    """Compare two waveforms, float32 [samples]; ``reason`` says why where they cannot be compared."""
    if baseline.shape != patched.shape:
        return Fidelity(False, reason=f"{len(patched)} samples against {len(baseline)} in the untouched arm")
    if not (np.isfinite(baseline).all() and np.isfinite(patched).all()):
        return Fidelity(False, reason="samples are not finite")
    if audio_sha256(baseline) == audio_sha256(patched):
        return Fidelity(True)
    return Fidelity(False, snr_db(baseline, patched), log_spectrum_l1(baseline, patched))


def snr_db(baseline: np.ndarray, patched: np.ndarray) -> float:
    """Signal-to-noise ratio in dB, the difference being the noise, within ±200 dB."""
    reference = baseline.astype(np.float64)
    signal = float(np.sum(reference**2))
    noise = float(np.sum((patched.astype(np.float64) - reference) ** 2))
    if noise == 0:
        return SNR_LIMIT_DB
    if signal == 0:
        return -SNR_LIMIT_DB
    return max(-SNR_LIMIT_DB, min(SNR_LIMIT_DB, 10 * math.log10(signal / noise)))


def log_spectrum_l1(baseline: np.ndarray, patched: np.ndarray) -> float:
    """Mean absolute difference of the natural-log magnitude spectra, 0 for two silences."""
    reference, other = _magnitudes(baseline), _magnitudes(patched)
    floor = FLOOR * float(reference.max()) or np.finfo(np.float64).tiny
    difference = reference.clamp(min=floor).log() - other.clamp(min=floor).log()
    return float(difference.abs().mean())


def _magnitudes(samples: np.ndarray) -> torch.Tensor:
    """[bins, frames] in float64; short audio is padded with zeros to one window."""
    signal = torch.from_numpy(samples.astype(np.float64))
    if len(signal) < WINDOW_SAMPLES:
        signal = torch.nn.functional.pad(signal, (0, WINDOW_SAMPLES - len(signal)))
    window = torch.hann_window(WINDOW_SAMPLES, dtype=torch.float64)
    spectrum = torch.stft(signal, WINDOW_SAMPLES, HOP_SAMPLES, window=window, center=False, return_complex=True)
    return spectrum.abs()
