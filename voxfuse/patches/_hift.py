"""What the stacks with a HiFTGenerator of their own (CosyVoice2, Chatterbox) share: its replacements.

``decode`` from CUDA graphs, and residual blocks for calls that no graph serves. ``inference`` and ``forward`` stay
upstream's: they draw the source, put ``cache_source`` over its start and call ``decode``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import hift_graph, snake_conv_block
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches import switches
from voxfuse.patches.guards import shadowed_by
from voxfuse.patches.spec import Patch


def patches(module: str, snake_module: str) -> tuple[Patch, ...]:
    """The patches of the HiFT in a module, whose Snake is in another or the same."""
    decode, block = f"{module}:HiFTGenerator.decode", f"{module}:ResBlock.forward"
    spectra = f"{module}:HiFTGenerator._stft", f"{module}:HiFTGenerator._istft"
    snake = f"{snake_module}:Snake.forward"
    foreign = functools.partial(_foreign_block, module, snake_module)
    return (
        Patch(
            fusion=hift_graph.HIFT_GRAPH,
            target=decode,
            absorbs=(decode, *spectra, block, snake),
            build=functools.partial(_decode, foreign=foreign),
            backends=("triton",),
        ),
        Patch(
            fusion=snake_conv_block.SNAKE_CONV_BLOCK,
            target=block,
            absorbs=(block, snake),
            build=functools.partial(_res_block, foreign=foreign),
        ),
    )


Foreign = Callable[[Any], "str | None"]


def _foreign_block(module: str, snake_module: str, block: Any) -> str | None:
    """Why a residual block or its Snakes are not upstream's own as they were tested, or None."""
    if type(block) is not sys.modules[module].ResBlock:
        return f"the block is {type(block).__name__}, expected upstream's ResBlock"
    for part in (*block.activations1, *block.activations2):
        if type(part) is not sys.modules[snake_module].Snake:
            return f"the activation is {type(part).__name__}, expected upstream's Snake"
        if (reason := shadowed_by(part, "forward")) is not None:
            return reason
    return None


def _foreign_generator(foreign_block: Foreign, hift: Any) -> str | None:
    for name in ("_stft", "_istft"):
        if (reason := shadowed_by(hift, name)) is not None:
            return reason
    for block in (*hift.source_resblocks, *hift.resblocks):
        if (reason := foreign_block(block) or shadowed_by(block, "forward")) is not None:
            return reason
    return None


def _decode(original: Callable[..., Any], run: Run, foreign: Foreign) -> Callable[..., Any]:
    of_generator: Callable[[nn.Module], str | None] = functools.partial(_foreign_generator, foreign)
    graphs = hift_graph.Runners(run, switches.read().capture, foreign=of_generator)
    silence = torch.zeros(1, 1, 0)  # upstream's default

    def decode(self: Any, x: torch.Tensor, s: torch.Tensor = silence) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return original(self, x, s)
        audio = graphs.decode(self, x, s)
        return original(self, x, s) if isinstance(audio, str) else audio

    return decode


def _res_block(original: Callable[..., Any], run: Run, foreign: Foreign) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        reason = foreign(self) or snake_conv_block.unsupported(self, x)
        if reason is not None:
            if not torch.compiler.is_compiling():
                TALLIES.add(run.receipt, fallback=reason)
            return original(self, x)
        return snake_conv_block.run_block(self, x, run)

    return forward
