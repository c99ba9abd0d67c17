"""What the stacks with a HiFT of their own (CosyVoice2, CosyVoice3, Chatterbox) share: its replacements.

f0 with source and ``decode`` from CUDA graphs, ``decode`` without one where there is none; residual blocks and sources
for calls that are outside of both, such as those in bf16.
``cache_source`` is written over the source between the two graphs, as upstream does. ``forward`` stays upstream's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from voxfuse.fusions import hift_graph, hift_source, hift_source_graph, snake_conv_block
from voxfuse.fusions.source import SINE_SOURCE
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels._weight_norm import class_of
from voxfuse.patches import switches
from voxfuse.patches.guards import shadowed_by, source_sha256
from voxfuse.patches.spec import Patch

CAUSAL = ("CausalConv1d", "CausalConv1dUpsample", "CausalConv1dDownSample")
# Of CausalConv1d.forward: causal blocks are of the same class as those of a stack that has no causal generator and does
# not absorb it, and a class has one replacement.
CAUSAL_CONV_SHA256 = "ea6e0f02372646d368ca74924f148c5627dc02f26cf4ea80c78e038d582ad471"


class Modules(NamedTuple):
    """Where a stack has its HiFT, and the classes of its source. ``causal``: its generator is CausalHiFTGenerator."""

    hift: str
    snake: str
    convolution: str
    predictor: str
    source: str = "SourceModuleHnNSF"
    sines: str = "SineGen2"
    causal: bool = False

    @property
    def of_sines(self) -> tuple[str, ...]:
        """What a replacement of the source absorbs."""
        names = ("forward", "_f02sine", "_f02uv") if self.sines == "SineGen2" else ("forward", "_f02uv")
        return (f"{self.hift}:{self.source}.forward", *(f"{self.hift}:{self.sines}.{name}" for name in names))

    @property
    def generator(self) -> str:
        """The generator's class as patches name it."""
        return f"{self.hift}:{'CausalHiFTGenerator' if self.causal else 'HiFTGenerator'}"


def patches(where: Modules) -> tuple[Patch, ...]:
    """The patches of the HiFT in these modules."""
    decode, block = f"{where.generator}.decode", f"{where.hift}:ResBlock.forward"
    parts = [f"{where.generator}.{name}" for name in ("_stft", "_istft")]
    block_parts = [block, f"{where.snake}:Snake.forward"]
    if where.causal:
        parts += [f"{where.convolution}:{name}.forward" for name in CAUSAL[1:]]
        block_parts.append(f"{where.convolution}:{CAUSAL[0]}.forward")
    inference = f"{where.generator}.inference"
    predictor = f"{where.predictor}:{'Causal' if where.causal else ''}ConvRNNF0Predictor.forward"
    of_predictor = [predictor, *([f"{where.convolution}:{CAUSAL[0]}.forward"] if where.causal else [])]
    source = Patch(
        fusion=SINE_SOURCE,
        target=where.of_sines[0],
        absorbs=where.of_sines,
        build=functools.partial(_source, where=where),
    )
    return (
        Patch(
            fusion=hift_source_graph.HIFT_SOURCE_GRAPH,
            target=inference,
            absorbs=(inference, *of_predictor, *where.of_sines),
            build=functools.partial(_causal_inference if where.causal else _inference, where=where),
            backends=("triton",),
        ),
        Patch(
            fusion=hift_graph.HIFT_GRAPH,
            target=decode,
            absorbs=(decode, *parts, *block_parts),
            build=functools.partial(_causal_decode if where.causal else _decode, where=where),
            backends=("triton",),
        ),
        Patch(
            fusion=snake_conv_block.SNAKE_CONV_BLOCK,
            target=block,
            absorbs=tuple(block_parts),
            build=functools.partial(_res_block, where=where),
        ),
        *([source] if where.sines == "SineGen2" else []),  # a stepped one needs to know that f0 is held
    )


def foreign_block(where: Modules, block: Any) -> str | None:
    """Why a residual block, its convolutions or its Snakes are not upstream's own as they were tested, or None."""
    if type(block) is not sys.modules[where.hift].ResBlock:
        return f"the block is {type(block).__name__}, expected upstream's ResBlock"
    for part in (*block.activations1, *block.activations2):
        if type(part) is not sys.modules[where.snake].Snake:
            return f"the activation is {type(part).__name__}, expected upstream's Snake"
        if (reason := shadowed_by(part, "forward")) is not None:
            return reason
    return next((reason for conv in (*block.convs1, *block.convs2) if (reason := _foreign_conv(where, conv))), None)


def _foreign_conv(where: Modules, conv: nn.Module) -> str | None:
    """Why a convolution is neither torch's own nor upstream's causal one as it was tested, or None."""
    kind: Any = class_of(conv)
    if kind in (nn.Conv1d, nn.ConvTranspose1d):
        return None
    if kind not in [vars(sys.modules[where.convolution]).get(name) for name in CAUSAL]:
        return f"the convolution is {kind.__module__}.{kind.__name__}, expected torch's or one of {where.convolution}"
    return None if where.causal else _untested(kind.forward)


@functools.lru_cache
def _untested(forward: Callable[..., Any]) -> str | None:
    """Why CausalConv1d.forward is not as it was tested, or None."""
    try:
        known = source_sha256(forward) == CAUSAL_CONV_SHA256
    except (OSError, TypeError) as error:
        return f"the source of CausalConv1d cannot be read: {error}"
    return None if known else "upstream changed: CausalConv1d.forward"


def foreign_generator(where: Modules, hift: Any) -> str | None:
    """Why a generator or a part of it is not upstream's own as it was tested, or None."""
    for name in ("_stft", "_istft"):
        if (reason := shadowed_by(hift, name)) is not None:
            return reason
    for conv in (hift.conv_pre, hift.conv_post, *hift.ups, *hift.source_downs):
        if (reason := _foreign_conv(where, conv)) is not None:
            return reason
    for block in (*hift.source_resblocks, *hift.resblocks):
        if (reason := foreign_block(where, block) or shadowed_by(block, "forward")) is not None:
            return reason
    return None


def _decode(original: Callable[..., Any], run: Run, where: Modules) -> Callable[..., Any]:
    of_generator = functools.partial(foreign_generator, where)
    graphs = hift_graph.Runners(run, switches.read().capture, foreign=of_generator)
    silence = torch.zeros(1, 1, 0)  # upstream's default

    def decode(self: Any, x: torch.Tensor, s: torch.Tensor = silence) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return original(self, x, s)
        audio = graphs.decode(self, x, s)
        return original(self, x, s) if isinstance(audio, str) else audio

    return decode


def _causal_decode(original: Callable[..., Any], run: Run, where: Modules) -> Callable[..., Any]:
    of_generator = functools.partial(foreign_generator, where)
    graphs = hift_graph.Runners(run, switches.read().capture, foreign=of_generator)
    silence = torch.zeros(1, 1, 0)

    def decode(self: Any, x: torch.Tensor, s: torch.Tensor = silence, finalize: bool = True) -> torch.Tensor:
        if torch.compiler.is_compiling() or not isinstance(finalize, bool):  # of others upstream asks twice
            return original(self, x, s, finalize)
        audio = graphs.decode(self, x, s, finalize=finalize)
        return original(self, x, s, finalize) if isinstance(audio, str) else audio

    return decode


def foreign_source(where: Modules, merge: Any) -> str | None:
    """Why a source or its sines are not upstream's own as they were tested, or None."""
    module = sys.modules[where.hift]
    for part, name in ((merge, where.source), (merge.l_sin_gen, where.sines)):
        if type(part) is not vars(module)[name]:
            return f"the source has {type(part).__name__}, expected upstream's {name}"
    names = ("forward", "_f02sine", "_f02uv")
    return next((reason for name in names if (reason := shadowed_by(merge.l_sin_gen, name)) is not None), None)


def _foreign_before(where: Modules, hift: Any) -> str | None:
    """Why a generator's f0 predictor and source are not upstream's own as they were tested, or None."""
    predictor, expected = hift.f0_predictor, f"{'Causal' if where.causal else ''}ConvRNNF0Predictor"
    if type(predictor) is not vars(sys.modules[where.predictor])[expected]:
        return f"the f0 predictor is {type(predictor).__name__}, expected upstream's {expected}"
    for part in (predictor, hift.m_source):
        if (reason := shadowed_by(part, "forward")) is not None:
            return reason
    convolutions = predictor.condnet[::2]
    return next((reason for conv in convolutions if (reason := _foreign_conv(where, conv))), None) or foreign_source(
        where, hift.m_source
    )


def _source_runners(run: Run, where: Modules) -> hift_source_graph.SourceRunners:
    return hift_source_graph.SourceRunners(
        run, switches.read().capture, foreign=functools.partial(_foreign_before, where)
    )


def _inference(original: Callable[..., Any], run: Run, where: Modules) -> Callable[..., Any]:
    graphs, nothing = _source_runners(run, where), torch.zeros(1, 1, 0)  # upstream's default

    @torch.inference_mode()
    def inference(
        self: Any, speech_feat: torch.Tensor, cache_source: torch.Tensor = nothing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source = "compiling" if torch.compiler.is_compiling() else graphs.source(self, speech_feat)
        if isinstance(source, str):
            return original(self, speech_feat, cache_source)
        if cache_source.shape[2] != 0:
            source[:, :, : cache_source.shape[2]] = cache_source
        return self.decode(x=speech_feat, s=source), source

    return inference


def _causal_inference(original: Callable[..., Any], run: Run, where: Modules) -> Callable[..., Any]:
    graphs = _source_runners(run, where)

    @torch.inference_mode()
    def inference(self: Any, speech_feat: torch.Tensor, finalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling() or not isinstance(finalize, bool):
            return original(self, speech_feat, finalize)
        predictor = self.f0_predictor
        if any(parameter.dtype != torch.float64 for parameter in predictor.parameters()):
            predictor.to(torch.float64)  # as upstream, which asks for it at every call
        ahead = 0 if finalize else predictor.condnet[0].causal_padding
        source = graphs.source(self, speech_feat, ahead=ahead)
        if isinstance(source, str):
            return original(self, speech_feat, finalize)
        mel = speech_feat[:, :, : speech_feat.shape[2] - ahead]
        return self.decode(x=mel, s=source, finalize=finalize), source

    return inference


def _source(original: Callable[..., Any], run: Run, where: Modules) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        reason = foreign_source(where, self) or hift_source.module_unsupported(self, x)
        if reason is not None:
            if not torch.compiler.is_compiling():
                TALLIES.add(run.receipt, fallback=reason)
            return original(self, x)
        return hift_source.run_module(self, x, run)

    return forward


def _res_block(original: Callable[..., Any], run: Run, where: Modules) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        reason = foreign_block(where, self) or snake_conv_block.unsupported(self, x)
        if reason is not None:
            if not torch.compiler.is_compiling():
                TALLIES.add(run.receipt, fallback=reason)
            return original(self, x)
        return snake_conv_block.run_block(self, x, run)

    return forward
