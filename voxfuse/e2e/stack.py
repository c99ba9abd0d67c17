"""What the gate asks of a stack driver."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from voxfuse.records import Record


class Text(Record, frozen=True, kw_only=True):
    """One text to speak. ``phonemes`` are in the stack's own alphabet where it takes phonemes, so no G2P is needed.

    ``tags`` say what kind of text it is (``short``, ``medium``, ``long``, ``numbers``, ``names``).
    """

    id: str
    text: str
    phonemes: str | None = None
    tags: tuple[str, ...] = ()


class Speech(NamedTuple):
    """Audio as float32 samples in [-1, 1], and wall seconds per stage (none where the driver is not timed)."""

    audio: np.ndarray
    stages: dict[str, float]


class Workload(Record, frozen=True, kw_only=True):
    """Which parts of the workload matrix a stack supports; what it does not is listed in the verdict."""

    streaming: bool
    concurrency: bool
    reference_audio: bool
    languages: tuple[str, ...]


class Stack(Protocol):
    """A driver: loads real weights, speaks one text with a seed, says what it supports.

    ``timed``: whether ``synthesize`` synchronises the device around its stages and reports their seconds. A driver may
    have ``stages`` (``voxfuse.profiles.capture.Stage``), by which ``voxfuse profile`` divides its time;
    ``unintelligible``, the reason why its audio has no words to transcribe (None where it has); and ``oracle()``, what
    the last call should have given, computed in fp64 from its own inputs, float64 samples.
    """

    name: str
    distribution: str
    sample_rate: int
    timed: bool
    workload: Workload

    @property
    def model(self) -> torch.nn.Module:
        """The loaded model: what ``apply_patches(model)`` takes."""

    @property
    def weights(self) -> str:
        """Which weights are loaded, with their checksum."""

    def load(self, device: str, model_dir: Path | None = None) -> None:
        """Load the model onto a device. Raises WeightsMissing, with what to do, where no weights can be had."""

    def synthesize(self, text: Text, seed: int) -> Speech:
        """Speak one text; the same seed gives the same audio on the same device."""


class WeightsMissing(RuntimeError):
    """No weights could be had; the message says where they were looked for and what to install."""
