"""Kokoro (PyPI ``kokoro``): text side and decoder from CUDA graphs, and their parts for calls that no graph serves.

The parts are AdaIN residual blocks of decoder, generator and prosody predictor, short-time spectra and the harmonic
source. Targets are classes, so ``KModel`` and bare ``Decoder`` or ``Generator`` users are served alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import adain_conv_block, adain_resblock, kokoro_text, source, spectral
from voxfuse.fusions.decoder_graph import DECODER_GRAPH, Runners
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches import switches
from voxfuse.patches._kokoro_import import load_kokoro
from voxfuse.patches.spec import Patch, StackPatches

ADAIN = "kokoro.istftnet:AdaIN1d.forward"
SNAKE_BLOCK = "kokoro.istftnet:AdaINResBlock1.forward"
LEAKY_RELU_BLOCK = "kokoro.istftnet:AdainResBlk1d._residual"
UPSAMPLE = "kokoro.istftnet:UpSample1d.forward"
DECODER = "kokoro.istftnet:Decoder.forward"
GENERATOR = "kokoro.istftnet:Generator.forward"
TRANSFORM = "kokoro.istftnet:TorchSTFT.transform"
INVERSE = "kokoro.istftnet:TorchSTFT.inverse"
SOURCE = "kokoro.istftnet:SourceModuleHnNSF.forward"
SINES = tuple(f"kokoro.istftnet:SineGen.{name}" for name in ("forward", "_f02sine", "_f02uv"))
OF_GENERATOR = (GENERATOR, SNAKE_BLOCK, ADAIN, TRANSFORM, INVERSE)
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


def _decoder(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    graphs = Runners(run, switches.read().capture)

    def forward(self: Any, asr: torch.Tensor, F0_curve: torch.Tensor, N: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return original(self, asr, F0_curve, N, s)
        audio = graphs.decoder(self, asr, F0_curve, N, s)
        return original(self, asr, F0_curve, N, s) if isinstance(audio, str) else audio

    return forward


def _generator(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    graphs = Runners(run, switches.read().capture)

    def forward(self: Any, x: torch.Tensor, s: torch.Tensor, f0: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return original(self, x, s, f0)
        audio = graphs.generator(self, x, s, f0)
        return original(self, x, s, f0) if isinstance(audio, str) else audio

    return forward


def _conv_block(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        reason = _foreign([*self.adain1, *self.adain2]) or adain_conv_block.unsupported(self, x, s)
        if reason is not None:
            _count_fallback(run, reason)
            return original(self, x, s)
        return adain_conv_block.run_block(self, x, s, run)

    return forward


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


def _transform(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def transform(self: Any, input_data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reason = spectral.unsupported(self)
        if input_data.dim() != 2:
            reason = f"samples must be [rows, samples], got {tuple(input_data.shape)}"
        if reason is not None:
            _count_fallback(run, reason)
            return original(self, input_data)
        return spectral.magnitude_and_phase(self, input_data, run)

    return transform


def _inverse(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def inverse(self: Any, magnitude: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
        reason = spectral.unsupported(self)
        if magnitude.dim() != 3:
            reason = f"spectra must be [rows, bins, frames], got {tuple(magnitude.shape)}"
        if reason is not None:
            _count_fallback(run, reason)
            return original(self, magnitude, phase)
        return spectral.waveform(self, magnitude, phase, run)

    return inverse


def _harmonic_source(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if type(self.l_sin_gen) is not sys.modules["kokoro.istftnet"].SineGen:
            reason: str | None = f"the sines come from {type(self.l_sin_gen).__name__}, expected upstream's SineGen"
        else:
            reason = source.unsupported(self, x)
        if reason is not None:
            _count_fallback(run, reason)
            return original(self, x)
        return source.harmonic_source(self, x, run)

    return forward


def _text_graph(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    graphs = kokoro_text.TextRunners(run, switches.read().capture)

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
            UPSAMPLE: "a333c6f66d58e8f70604351430e675ab852bf30e02a7b61a29267688cea2fa90",
            DECODER: "bdd1f32771dcbe0e80385c822ac211bd225ab7e6827a3fda0e1831dd5bebb21b",
            GENERATOR: "e7be87837eab891db992a138d3a72bfa83c5d890da57d6302400269e4ef8b35f",
            TRANSFORM: "2332f64e8cd11dc457ac4166c59ab755e48ecd25cfd793bb6ade064bbef2a2c1",
            INVERSE: "a9f80be013a66c457a52c77d573d96659f1ec2df8a663024214f7d8353046c97",
            SOURCE: "a40058bb237352615464854c63ebadef68e106da68742f3d1607760122b0bbcf",
            SINES[0]: "35d9d550be3f3f25fd788a4a3950250489a118f784e8049c0cf87186de2550f0",
            SINES[1]: "4fee83501dc5a60476ac61d500422125218cd2f4d77788e3b866f0a1aa76c9f5",
            SINES[2]: "1fe169eb68ea2b4b85d059ffdd4e938a2655eb75f9a7da2a6e3c1560d470fc6d",
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
            fusion=DECODER_GRAPH,
            target=DECODER,
            absorbs=(DECODER, LEAKY_RELU_BLOCK, BLOCK, SHORTCUT, UPSAMPLE, *OF_GENERATOR),
            build=_decoder,
            backends=("triton",),
        ),
        Patch(fusion=DECODER_GRAPH, target=GENERATOR, absorbs=OF_GENERATOR, build=_generator, backends=("triton",)),
        Patch(
            fusion=adain_conv_block.ADAIN_CONV_BLOCK,
            target=SNAKE_BLOCK,
            absorbs=(SNAKE_BLOCK, ADAIN),
            build=_conv_block,
        ),
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
        Patch(fusion=spectral.STFT_POLAR, target=TRANSFORM, absorbs=(TRANSFORM,), build=_transform),
        Patch(fusion=spectral.ISTFT_POLAR, target=INVERSE, absorbs=(INVERSE,), build=_inverse),
        Patch(fusion=source.SINE_SOURCE, target=SOURCE, absorbs=(SOURCE, *SINES), build=_harmonic_source),
        Patch(
            fusion=kokoro_text.TEXT_GRAPH,
            target=SPEAK,
            absorbs=(SPEAK, *TEXT_SIDE, LEAKY_RELU_BLOCK, UPSAMPLE, ADAIN),
            build=_text_graph,
            backends=("triton",),
        ),
    ),
)
