"""Frames in phases: how a convolution with dilation d becomes one without.

A tensor [rows, padded, channels] in d phases holds frame t at (t mod d) · padded / d + t div d, ``padded`` being the
least multiple of d that holds all frames: as [rows · d, padded / d, channels] it is d times as many rows, over which a
convolution with dilation 1 does what one with dilation d does over time. One phase is the plain order.
"""

from __future__ import annotations

import torch

from voxfuse.kernels._triton import tl, triton


def padded_frames(frames: int, phases: int) -> int:
    """The least multiple of ``phases`` that holds ``frames``."""
    return -(-frames // phases) * phases


@triton.jit
def phase_position(t, per_phase, PHASES: tl.constexpr):
    """Where frame t lies among PHASES · per_phase."""
    if PHASES == 1:
        return t
    return (t % PHASES) * per_phase + t // PHASES


def to_phases(x: torch.Tensor, phases: int) -> torch.Tensor:
    """x [rows, frames, channels] in plain order → [rows, padded, channels] in phases; zeros fill up."""
    rows, frames, channels = x.shape
    padded = x.new_zeros(rows, padded_frames(frames, phases), channels)
    padded[:, :frames] = x
    return padded.view(rows, padded.shape[1] // phases, phases, channels).transpose(1, 2).reshape(padded.shape)


def from_phases(x: torch.Tensor, frames: int, phases: int) -> torch.Tensor:
    """x [rows, padded, channels] in phases → its first ``frames`` frames in plain order."""
    rows, padded, channels = x.shape
    return (
        x.reshape(rows, phases, padded // phases, channels).transpose(1, 2).reshape(rows, padded, channels)[:, :frames]
    )
