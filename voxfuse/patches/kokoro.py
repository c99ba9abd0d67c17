"""Kokoro (PyPI ``kokoro``): AdaIN residual blocks of the decoder, the generator and the prosody predictor, and the text
side of KModel as captured graphs.

Targets are classes, so ``KModel`` and bare ``Decoder`` or ``Generator`` users are served alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import adain_resblock, kokoro_text
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches._kokoro_import import load_kokoro
from voxfuse.patches.spec import Patch, StackPatches

ADAIN = "kokoro.istftnet:AdaIN1d.forward"
SNAKE_BLOCK = "kokoro.istftnet:AdaINResBlock1.forward"
LEAKY_RELU_BLOCK = "kokoro.istftnet:AdainResBlk1d._residual"
SPEAK = "kokoro.model:KModel.forward_with_tokens"
BERT = "kokoro.modules:CustomAlbert.forward"
DURATION_ENCODER = "kokoro.modules:DurationEncoder.forward"
ADA_LAYER_NORM = "kokoro.modules:AdaLayerNorm.forward"
TEXT_ENCODER = "kokoro.modules:TextEncoder.forward"
LAYER_NORM = "kokoro.modules:LayerNorm.forward"
CURVES = "kokoro.modules:ProsodyPredictor.F0Ntrain"
BLOCK = "kokoro.istftnet:AdainResBlk1d.forward"
SHORTCUT = "kokoro.istftnet:AdainResBlk1d._shortcut"
TEXT_SIDE = (BERT, DURATION_ENCODER, ADA_LAYER_NORM, TEXT_ENCODER, LAYER_NORM, CURVES, BLOCK, SHORTCUT)


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


def _text_graph(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    graphs = kokoro_text.TextRunners(run)

    def forward_with_tokens(
        self: Any, input_ids: torch.Tensor, ref_s: torch.Tensor, speed: float = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spoken = None if torch.compiler.is_compiling() else graphs.speak(self, input_ids, ref_s, speed)
        if spoken is None or isinstance(spoken, str):
            spoken = original(self, input_ids, ref_s, speed)
        return spoken

    return forward_with_tokens


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
            SPEAK: "bd39a6be9ccc4ca70077721be3e037609afb08ada6aa70a4d91b0d535edea4ac",
            BERT: "e3d58415b6698cf9dd633dcc860d690c2f7afd5a0acdb9ea634045804ed8efcc",
            DURATION_ENCODER: "bd1efd58f5b895e984b4a968ad35280e489fd5c0a7f1db7192b34336ffe71599",
            ADA_LAYER_NORM: "2cedd4290af9cab2aaa69b269dff6d907cd63d18dc3277357fba40443dbf736c",
            TEXT_ENCODER: "ac084e41f1b23331a6162f9260f9a285cf9a9551dbe594130df98069cbcafeae",
            LAYER_NORM: "855e313843e19dd0c8d10d567d80333aaeaa5c15110532b051afbeeba264132e",
            CURVES: "f5044e85211594a9433e872330b7b37e22ca85c9c3c77dc7d76b731569c29cea",
            BLOCK: "ebee9715cc300363787061fa02e20f481af4a0d2a40f3edf0dc0643af52e591c",
            SHORTCUT: "02b98464812e3046c1ef9dc7d8bc98f07e458664e83efdf32d3401b100183316",
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
        Patch(
            fusion=kokoro_text.TEXT_GRAPH,
            target=SPEAK,
            absorbs=(SPEAK, *TEXT_SIDE, LEAKY_RELU_BLOCK, ADAIN),
            build=_text_graph,
            backends=("triton",),
        ),
    ),
)
