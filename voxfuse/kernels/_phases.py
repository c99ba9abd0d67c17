"""Frames in phases: how a convolution with dilation d becomes one without.

A tensor [rows, padded, channels] in d phases holds frame t at (t mod d) · padded / d + t div d, ``padded`` being the
least multiple of d that holds all frames: as [rows · d, padded / d, channels] it is d times as many rows, over which a
convolution with dilation 1 does what one with dilation d does over time. One phase is the plain order.

A ``Layout`` adds frames of zeros in front of and behind each phase, so that a convolution whose taps do not lie alike
on both sides of a frame, or that takes several frames as one, reads them there (``_conv_plan``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from voxfuse.kernels._triton import tl, triton


def padded_frames(frames: int, phases: int) -> int:
    """The least multiple of ``phases`` that holds ``frames``."""
    return -(-frames // phases) * phases


class Layout(NamedTuple):
    """How frames lie for a convolution: its phases, and frames of zeros in front of and behind each of them."""

    phases: int
    lead: int
    tail: int

    def held(self, frames: int) -> int:
        """How many frames the phases have together, zeros included."""
        return padded_frames(frames, self.phases) + self.phases * (self.lead + self.tail)


PLAIN = Layout(1, 0, 0)


@triton.jit
def phase_position(t, per_phase, PHASES: tl.constexpr):
    """Where frame t lies among PHASES · per_phase."""
    if PHASES == 1:
        return t
    return (t % PHASES) * per_phase + t // PHASES


def to_phases(x: torch.Tensor, phases: int, lead: int = 0, tail: int = 0) -> torch.Tensor:
    """x [rows, frames, channels] in plain order → [rows, held, channels] in a layout; zeros fill up."""
    rows, frames, channels = x.shape
    held = x.new_zeros(rows, Layout(phases, lead, tail).held(frames), channels)
    held[:, lead * phases : lead * phases + frames] = x
    return held.view(rows, held.shape[1] // phases, phases, channels).transpose(1, 2).reshape(held.shape)


def from_phases(x: torch.Tensor, frames: int, phases: int, lead: int = 0) -> torch.Tensor:
    """x [rows, held, channels] in phases → ``frames`` frames in plain order, those behind ``lead`` of each phase."""
    rows, held, channels = x.shape
    plain = x.reshape(rows, phases, held // phases, channels).transpose(1, 2).reshape(rows, held, channels)
    return plain[:, phases * lead : phases * lead + frames]
