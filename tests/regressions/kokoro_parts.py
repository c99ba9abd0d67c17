"""Kokoro's own classes at small sizes, with random weights: no download, no text front end."""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from types import ModuleType

import torch

import voxfuse
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


def speak_in_child(answers: multiprocessing.Queue) -> None:
    """What a server's stage worker does: patch, run, report. Here, where a spawned process can import it."""
    patches = voxfuse.apply_patches("kokoro", policy="all", backend="reference", include=["adain_snake"])
    build, inputs = MODEL_PARTS["AdaINResBlock1"]
    with torch.no_grad():
        build().eval()(*inputs())
    answers.put([receipt for receipt in patches.receipts if receipt.fusion == "adain_snake"])
