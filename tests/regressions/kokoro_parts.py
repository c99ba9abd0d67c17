"""Kokoro's own classes at small sizes, with random weights: no download, no text front end."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import torch

from voxfuse.patches.kokoro import KOKORO


def istftnet() -> ModuleType:
    """``kokoro.istftnet``, imported as the stack file does."""
    KOKORO.load()
    return sys.modules["kokoro.istftnet"]


def _quiet(kind: str, *args: object, **kwargs: object) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # upstream uses the old weight_norm
        return getattr(istftnet(), kind)(*args, **kwargs)


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, 8, 24, generator=generator), torch.randn(2, 64, generator=generator)


MODEL_PARTS = {
    "AdaINResBlock1": (lambda: _quiet("AdaINResBlock1", 8), _inputs),
    "AdainResBlk1d": (lambda: _quiet("AdainResBlk1d", 8, 4, upsample=True), _inputs),
}
