"""Residual blocks with Snake (HiFTNet, HiFi-GAN with Snake) channels last: x + conv2(snake(conv1(snake(x)))), repeated.

A pair of convolutions is one kernel of ours where that was measured to be faster (kernels/snake_conv_pair.py, on
Hopper, by the table in kernels/_conv_plan.py): it reads x and writes the pair's result, and what is activated is never
in memory. Elsewhere one pass stands between two convolutions: bias, residual, Snake and the phases of the next dilation
(kernels/snake.py); the convolutions are cuDNN's without bias and dilation (kernels/conv1d.py). Which of both is told by
shapes, types, the device and whether TF32 is allowed, not by trying. Parameters stay as upstream made them; folded and
repacked weights live beside the modules.
Source: ResBlock in cosyvoice/hifigan/generator.py and chatterbox/models/s3gen/hifigan.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from voxfuse.kernels._conv_plan import pair_wins
from voxfuse.kernels._hopper_conv import MAX_HALO, suits
from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels._phases import PLAIN
from voxfuse.kernels._weight_norm import folded, sources
from voxfuse.kernels.conv1d import conv_unsupported, convolved, planned, taps_before
from voxfuse.kernels.moments import FLOAT_TYPES
from voxfuse.kernels.snake import EPS, snake
from voxfuse.kernels.snake_conv_pair import packed_pair, snake_conv_pair
from voxfuse.records import Fusion, FusionPattern

SNAKE_CONV_BLOCK = Fusion(
    name="snake_conv_block",
    stacks=("cosyvoice2", "cosyvoice3", "chatterbox"),
    operations=("snake", "weight norm", "conv1d", "bias", "residual add"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16 [rows, channels, frames] in the type of the weights, outside autocast; Conv1d with "
    "odd taps that keeps the length, causal or not; inference only",
    kernels=("snake", "conv1d", "snake_conv_pair"),
    patterns=(FusionPattern(modules=("ResBlock", "Snake")),),
)
Pair = tuple[Any, Any, Any, Any]  # both convolutions, then the Snakes before them


def block_fault(block: Any) -> str | None:
    """What in a block is not as upstream builds it, or None: asked of its structure."""
    convolutions = [*block.convs1, *block.convs2]
    activations = [*block.activations1, *block.activations2]
    if not len(block.convs1) == len(block.convs2) == len(block.activations1) == len(block.activations2) > 0:
        return f"expected as many Snakes as convolutions, got {len(activations)} and {len(convolutions)}"
    for part in activations:
        if part.alpha_logscale or part.no_div_by_zero != EPS or part._forward_hooks or part._forward_pre_hooks:
            return f"expected Snake with a linear alpha, eps {EPS} and no hooks, got {part}"
        if part.alpha.dim() != 1:
            return f"expected an alpha of each channel, got {tuple(part.alpha.shape)}"
    for conv in convolutions:
        if (reason := conv_unsupported(conv)) is not None:
            return reason
        if conv.bias is None or conv.in_channels != conv.out_channels:
            return f"expected a bias and as many channels out as in, got {conv}"
    return None


def unsupported(block: Any, x: torch.Tensor) -> str | None:
    """Why a block cannot be fused on x [rows, channels, frames], or None."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *block.parameters())):
        return "a gradient is needed; call under torch.no_grad() or torch.inference_mode()"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on: it gives every operation a type of its own"
    if (reason := block_fault(block)) is not None:
        return reason
    channels = block.convs1[0].in_channels
    if x.dim() != 3 or x.shape[1] != channels or x.numel() == 0:
        return f"x must be [rows, {channels}, frames] and not empty, got {tuple(x.shape)}"
    alpha = block.activations1[0].alpha  # stands for all weights, whose types a convolution cannot mix
    if x.dtype not in FLOAT_TYPES or x.dtype != alpha.dtype:
        return f"x and weights must be one of fp32, fp16 and bf16, the same for all, got {x.dtype} and {alpha.dtype}"
    return None


def run_block(block: Any, x: torch.Tensor, run: Run) -> torch.Tensor:
    """ResBlock.forward: x [rows, channels, frames] in any layout; the result is channels last in memory."""
    return snake_block(block, x.transpose(1, 2), None, run).transpose(1, 2)


def snake_block(block: Any, x: torch.Tensor, lengths: torch.Tensor | None, run: Run) -> torch.Tensor:
    """ResBlock.forward of x [rows, frames, channels] in any strides, ``lengths`` [rows] valid frames or None.

    The result is contiguous and zero behind each row's valid length, whatever x holds there.
    """
    fusable = runs_pairs(x, run)
    pairs: list[Pair] = list(zip(block.convs1, block.convs2, block.activations1, block.activations2, strict=True))
    for one_pass, group in itertools.groupby(pairs, key=lambda pair: fusable and wins_in_one_pass(*pair[:2])):
        x = (_in_one_pass_each if one_pass else _chained)(list(group), x, lengths, run)
    return x


def runs_pairs(x: torch.Tensor, run: Run) -> bool:
    """Whether ``snake_conv_pair`` runs on x's device in x's type: the chain is what is meant elsewhere, no fallback."""
    return run.backend == "triton" and suits(x.device, x.dtype)


def wins_in_one_pass(conv1: Any, conv2: Any) -> bool:
    """Whether two convolutions are in the envelope of ``snake_conv_pair``, and faster in it than one by one."""
    (taps,), (dilation,) = conv1.kernel_size, conv1.dilation
    alike = (conv2.kernel_size, conv2.dilation, conv2.in_channels) == ((taps,), (1,), conv1.in_channels)
    return alike and dilation * (taps - 1) <= MAX_HALO and pair_wins(conv1.in_channels, taps)


def _in_one_pass_each(pairs: Sequence[Pair], x: torch.Tensor, lengths: torch.Tensor | None, run: Run) -> torch.Tensor:
    _, frames, channels = x.shape
    if x.stride() != (frames * channels, channels, 1):  # in particular channels that are not last in memory
        x, _ = snake(x, None, None, None, lengths, frames, 1, *PLAIN, True, run=run)
    for conv1, conv2, snake1, snake2 in pairs:
        weights = pack(conv1, "pair", [*sources(conv1), *sources(conv2)], functools.partial(_stacked, conv1, conv2))
        given = snake1.alpha, conv1.bias, snake2.alpha, conv2.bias, lengths
        befores = taps_before(conv1), taps_before(conv2)
        x = snake_conv_pair(x, *weights, *given, conv1.dilation[0], *befores, run=run)
    return x


def _stacked(conv1: Any, conv2: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a pair [2, out, taps, in] with weight norm folded, and as the kernel reads them."""
    weights = torch.stack([folded(conv).permute(0, 2, 1) for conv in (conv1, conv2)]).contiguous()
    return weights, packed_pair(weights)


def _chained(pairs: Sequence[Pair], x: torch.Tensor, lengths: torch.Tensor | None, run: Run) -> torch.Tensor:
    rows, frames, _ = x.shape
    snakes = [part.alpha for *_, snake1, snake2 in pairs for part in (snake1, snake2)]
    convolutions = [conv for conv1, conv2, *_ in pairs for conv in (conv1, conv2)]
    plans, layouts = zip(*(planned(conv, rows, frames) for conv in convolutions), strict=True)
    _, y = snake(x, None, None, snakes[0], lengths, frames, 1, *layouts[0], False, run=run)
    for i, (conv, plan) in enumerate(zip(convolutions, plans, strict=True)):
        y, d = convolved(conv, y, plan), conv.dilation[0]
        if i % 2 == 0:
            _, y = snake(y, conv.bias, None, snakes[i + 1], lengths, frames, d, *layouts[i + 1], False, run=run)
        elif i + 1 < len(convolutions):
            x, y = snake(y, conv.bias, x, snakes[i + 1], lengths, frames, d, *layouts[i + 1], True, run=run)
        else:
            x, _ = snake(y, conv.bias, x, None, lengths, frames, d, *PLAIN, True, run=run)
    return x
