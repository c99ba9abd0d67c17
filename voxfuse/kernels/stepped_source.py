"""Harmonic source of a neural source-filter vocoder whose phase is summed sample by sample (SineGen: Chatterbox).

As ``voxfuse.kernels.sine_source``, whose kernel this is, with another phase: the sum of ρ over all samples up to t, and
``initial`` behind it, without interpolation. f0 is [rows, frames] alone, held for ``scale`` samples; initial [rows,
harmonics] contiguous, in turns from −1/2 to 1/2, 0 for the fundamental. In frame i, in turns,
φ_k = scale · Σ_{j<i} ρ_kj + (t − i · scale + 1) · ρ_ki + initial_k.
Contract and envelope: as there.
Source: SourceModuleHnNSF.forward and SineGen.forward in chatterbox/models/s3gen/hifigan.py.
"""

from __future__ import annotations

from typing import Any

import torch

from voxfuse.kernels._op import fused_op
from voxfuse.kernels.sine_source import fake, launch_source, merged, zero_tail
from voxfuse.kernels.sine_source import unsupported as interpolated_unsupported


def unsupported(f0: torch.Tensor, initial: torch.Tensor, noise: torch.Tensor, *rest: Any) -> str | None:
    """Why a call of ``stepped_source`` is outside the envelope, or None."""
    if (reason := interpolated_unsupported(f0, initial, noise, *rest)) is not None:
        return reason
    if f0.shape[1] == noise.shape[1]:
        return f"f0 must be one value for each frame, got {tuple(f0.shape)} for {noise.shape[1]} samples"
    if initial.shape != (noise.shape[0], noise.shape[2]) or not initial.is_contiguous():
        return f"initial must be contiguous [{noise.shape[0]}, {noise.shape[2]}], got {tuple(initial.shape)}"
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
    """The upstream chain of SineGen; then the zero tail."""
    f0 = f0.repeat_interleave(scale, 1).unsqueeze(-1)  # [rows, samples, 1]
    turns = torch.cat([f0 * k / sampling_rate for k in range(1, noise.shape[2] + 1)], dim=2)
    theta = 2 * torch.pi * (torch.cumsum(turns, dim=1) % 1)
    sines = amplitude * torch.sin(theta + 2 * torch.pi * initial.unsqueeze(1))
    return zero_tail(merged(sines, f0, noise, weight, bias, amplitude, noise_std, threshold), lengths, scale)


@fused_op(
    "stepped_source",
    "(Tensor f0, Tensor initial, Tensor noise, Tensor weight, Tensor bias, Tensor? lengths, int scale,"
    " float sampling_rate, float amplitude, float noise_std, float threshold) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=fake,
)
def stepped_source(
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
    """Source signal [rows, samples] of f0 [rows, frames] and noise; formula in the module's docstring."""
    return launch_source(
        f0, initial, noise, weight, bias, lengths, scale, sampling_rate, amplitude, noise_std, threshold
    )
