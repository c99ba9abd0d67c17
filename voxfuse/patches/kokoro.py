"""Kokoro (PyPI ``kokoro``): AdaIN residual blocks of the decoder, the generator and the prosody predictor.

Targets are classes, so ``KModel`` and bare ``Decoder`` or ``Generator`` users are served alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import adain_resblock
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches._kokoro_import import load_kokoro
from voxfuse.patches.spec import Patch, StackPatches

ADAIN = "kokoro.istftnet:AdaIN1d.forward"
SNAKE_BLOCK = "kokoro.istftnet:AdaINResBlock1.forward"
LEAKY_RELU_BLOCK = "kokoro.istftnet:AdainResBlk1d._residual"


def _foreign(norms: Sequence[Any]) -> str | None:
    """Why AdaIN modules are not upstream's own as they were tested, or None."""
    upstream = sys.modules["kokoro.istftnet"].AdaIN1d
    for norm in norms:
        if type(norm) is not upstream:
            return f"AdaIN is {type(norm).__name__}, expected upstream's AdaIN1d"
    return None


def _count_fallback(run: Run, reason: str) -> None:
    if not torch.compiler.is_compiling():
        TALLIES.add(run.receipt, fallback=reason)


def _snake_block(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        norms = [*self.adain1, *self.adain2]
        reason = _foreign(norms) or adain_resblock.unsupported(self, norms, x, s)
        if reason is not None:
            _count_fallback(run, reason)
            return original(self, x, s)
        return adain_resblock.adain_snake_resblock(self, x, s, run)

    return forward


def _leaky_relu_block(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def _residual(self: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        norms = [self.norm1, self.norm2]
        reason = _foreign(norms) or adain_resblock.unsupported(self, norms, x, s)
        if type(self.actv) is not nn.LeakyReLU:
            reason = f"the activation is {type(self.actv).__name__}, expected LeakyReLU"
        if reason is not None:
            _count_fallback(run, reason)
            return original(self, x, s)
        return adain_resblock.adain_leaky_relu_residual(self, x, s, run)

    return _residual


KOKORO = StackPatches(
    name="kokoro",
    distribution="kokoro",
    modules=("kokoro.istftnet", "kokoro.modules", "kokoro.model"),
    load=load_kokoro,
    sources={
        "0.9.4": {
            ADAIN: "61e64abe50225ff8d974c3909d9b41189a8437cbef2d26bf33469aeeeb36d3a9",
            SNAKE_BLOCK: "8e4637234512714b915f9757f00ad49adf71bd8b5ddcac633105d9d5e052e578",
            LEAKY_RELU_BLOCK: "807ee0f3559f52fb79f570b0bd61adc09e9dfa767b72c9c4ef04df20769f3676",
        }
    },
    patches=(
        Patch(
            fusion=adain_resblock.ADAIN_SNAKE,
            target=SNAKE_BLOCK,
            absorbs=(SNAKE_BLOCK, ADAIN),
            build=_snake_block,
        ),
        Patch(
            fusion=adain_resblock.ADAIN_LEAKY_RELU,
            target=LEAKY_RELU_BLOCK,
            absorbs=(LEAKY_RELU_BLOCK, ADAIN),
            build=_leaky_relu_block,
        ),
    ),
)
