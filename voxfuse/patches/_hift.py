"""What the stacks with a HiFT of their own (CosyVoice2, CosyVoice3, Chatterbox) share: its replacements.

``decode`` from CUDA graphs, and residual blocks for calls that no graph serves. ``forward`` stays upstream's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from voxfuse.fusions import hift_graph, snake_conv_block
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
    """Where a stack has its HiFT; ``causal``: its generator is CausalHiFTGenerator."""

    hift: str
    snake: str
    convolution: str
    causal: bool = False

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
    return (
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


def _res_block(original: Callable[..., Any], run: Run, where: Modules) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        reason = foreign_block(where, self) or snake_conv_block.unsupported(self, x)
        if reason is not None:
            if not torch.compiler.is_compiling():
                TALLIES.add(run.receipt, fallback=reason)
            return original(self, x)
        return snake_conv_block.run_block(self, x, run)

    return forward
