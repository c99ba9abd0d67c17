"""AdaIN residual blocks (StyleTTS 2, Kokoro): instance norm, style affine and activation as one fused operation.

The functions take the block as upstream built it and touch none of its parameters: convolutions run through their own
modules (weight-norm hooks included), and the style projections of a block are packed beside it into one matrix
product. Source: AdaINResBlock1.forward and AdainResBlk1d._residual in kokoro/istftnet.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels.adain import adain_act
from voxfuse.records import Fusion, FusionPattern

ADAIN_SNAKE = Fusion(
    name="adain_snake",
    stacks=("kokoro",),
    operations=("instance_norm", "style affine", "snake"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16 [rows, channels, frames], at least two frames; inference only",
    kernels=("adain",),
    patterns=(
        FusionPattern(
            operations=("reciprocal", "mul", "mul", "sin", "pow", "mul", "add"), modules=("AdaINResBlock1",), ranks=(3,)
        ),
        FusionPattern(modules=("AdaINResBlock1", "AdaIN1d")),
    ),
)
ADAIN_LEAKY_RELU = Fusion(
    name="adain_leaky_relu",
    stacks=("kokoro",),
    operations=("instance_norm", "style affine", "leaky_relu"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16 [rows, channels, frames], at least two frames; inference only",
    kernels=("adain",),
    patterns=(
        FusionPattern(operations=("leaky_relu",), modules=("AdainResBlk1d", "LeakyReLU"), ranks=(3,)),
        FusionPattern(modules=("AdainResBlk1d", "AdaIN1d")),
    ),
)


def unsupported(block: nn.Module, norms: Sequence[Any], *inputs: torch.Tensor) -> str | None:
    """Why a block with these AdaIN modules (``fc``: Linear, ``norm``: InstanceNorm1d) cannot be fused, or None."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *block.parameters())):
        return "a gradient is needed; call under torch.no_grad() or torch.inference_mode()"
    for norm in norms:
        if type(norm.fc) is not nn.Linear:
            return f"AdaIN's fc is {type(norm.fc).__name__}, expected Linear"
        if type(norm.norm) is not nn.InstanceNorm1d or norm.norm.track_running_stats:
            return f"AdaIN's norm is {norm.norm}, expected InstanceNorm1d without running statistics"
    return None


def snake_norms(block: Any) -> list[Any]:
    """The AdaIN modules of an AdaINResBlock1 in the order of their use."""
    return [norm for pair in zip(block.adain1, block.adain2, strict=True) for norm in pair]


def padded_styles(module: nn.Module, norms: Sequence[tuple[Any, int]], style: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """γ and β of every AdaIN, each [rows, 2·width] with zeros behind its channels, from style [rows, style_dim] in one
    matrix product; packed beside ``module``."""

    def build() -> tuple[torch.Tensor, torch.Tensor]:
        weights, biases = [], []
        for norm, width in norms:
            spare = width - norm.norm.num_features
            weights.append(F.pad(norm.fc.weight.unflatten(0, (2, -1)), (0, 0, 0, spare)).flatten(0, 1))
            biases.append(F.pad(norm.fc.bias.unflatten(0, (2, -1)), (0, spare)).flatten())
        return torch.cat(weights), torch.cat(biases)

    sources = [parameter for norm, _ in norms for parameter in (norm.fc.weight, norm.fc.bias)]
    weight, bias = pack(module, "padded_styles", sources, build)
    return F.linear(style, weight, bias).split([2 * width for _, width in norms], dim=1)


def adain_snake_resblock(block: Any, x: torch.Tensor, style: torch.Tensor, run: Run) -> torch.Tensor:
    """AdaINResBlock1: three times x + conv2(snake(adain2(conv1(snake(adain1(x)))))); x [rows, channels, frames]."""
    projected = iter(padded_styles(block, [(norm, x.shape[1]) for norm in snake_norms(block)], style))
    act = functools.partial(_adain, slope=0.0, run=run)
    stages = zip(block.convs1, block.convs2, block.adain1, block.adain2, block.alpha1, block.alpha2, strict=True)
    for conv1, conv2, adain1, adain2, alpha1, alpha2 in stages:
        style1, style2 = next(projected), next(projected)
        # No intermediate has a name: each must be freed before the next convolution, or the peak memory rises.
        x = conv2(act(adain2, conv1(act(adain1, x, style1, alpha1)), style2, alpha2)) + x
    return x


def adain_leaky_relu_residual(block: Any, x: torch.Tensor, style: torch.Tensor, run: Run) -> torch.Tensor:
    """AdainResBlk1d._residual: conv2(act(adain2(conv1(pool(act(adain1(x))))))); x [rows, channels, frames]."""
    slope = block.actv.negative_slope
    widths = [(norm, norm.norm.num_features) for norm in (block.norm1, block.norm2)]
    style1, style2 = padded_styles(block, widths, style)
    x = block.pool(_adain(block.norm1, x, style1, None, slope, run))
    x = block.conv1(block.dropout(x))
    x = _adain(block.norm2, x, style2, None, slope, run)
    return block.conv2(block.dropout(x))


def _adain(
    module: Any,
    x: torch.Tensor,
    style: torch.Tensor,
    alpha: torch.Tensor | None,
    slope: float,
    run: Run,
) -> torch.Tensor:
    norm = module.norm
    return adain_act(x, style, norm.weight, norm.bias, alpha, None, norm.eps, slope, run=run)
