"""AdaIN + Snake residual blocks (StyleTTS 2, Kokoro) channels last: each convolution with its pointwise neighbours.

Between two convolutions stand two passes: bias, residual and moments in the one, AdaIN and Snake in the other. A bias
in front of an AdaIN is left out: the instance norm takes any constant of a channel away again. Parameters stay as
upstream made them; folded and repacked weights live beside the modules. Source: AdaINResBlock1.forward in
kokoro/istftnet.py.
"""

from __future__ import annotations

from typing import Any

import torch

from voxfuse.fusions import adain_resblock
from voxfuse.kernels._op import Run
from voxfuse.kernels.adain_channels_last import adain_channels_last
from voxfuse.kernels.conv1d import conv1d, conv_unsupported, packed_weight, padded_frames
from voxfuse.kernels.moments import FLOAT_TYPES, moments, residual_moments
from voxfuse.records import Fusion, FusionPattern

ADAIN_CONV_BLOCK = Fusion(
    name="adain_conv_block",
    stacks=("kokoro",),
    operations=("instance_norm", "style affine", "snake", "weight norm", "conv1d", "bias", "residual add"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16 [rows, channels, frames] in the type of the weights, at least two frames, outside "
    "autocast; Conv1d with odd taps that keeps the length; inference only",
    kernels=("conv1d", "moments", "adain_channels_last"),
    patterns=(FusionPattern(modules=("AdaINResBlock1",)),),
)


def unsupported(block: Any, x: torch.Tensor, style: torch.Tensor) -> str | None:
    """Why a block with these inputs cannot be fused, or None."""
    reason = adain_resblock.unsupported(block, [*block.adain1, *block.adain2], x, style)
    if reason is not None:
        return reason
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on: it gives every operation a type of its own"
    if x.dim() != 3 or x.shape[2] < 2:
        return f"x must be [rows, channels, at least two frames], got {tuple(x.shape)}"
    alpha = block.alpha1[0]  # stands for all weights, whose types a convolution cannot mix
    if x.dtype not in FLOAT_TYPES or not x.dtype == style.dtype == alpha.dtype:
        types = f"{x.dtype}, {style.dtype} and {alpha.dtype}"
        return f"x, style and weights must be one of fp32, fp16 and bf16, the same for all, got {types}"
    for conv in (*block.convs1, *block.convs2):
        reason = conv_unsupported(conv)
        if reason is None and (conv.in_channels, conv.out_channels) != (x.shape[1], x.shape[1]):
            reason = f"x must have the {conv.in_channels} channels of the convolutions, got {x.shape[1]}"
        if reason is not None:
            return reason
    return None


def adain_conv_block(
    block: Any, x: torch.Tensor, style: torch.Tensor, lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """AdaINResBlock1: three times x + conv2(snake(adain2(conv1(snake(adain1(x)))))).

    x [rows, channels, frames] in any layout, style [rows, style_dim], ``lengths`` [rows] valid frames or None. The
    result [rows, channels, frames] is channels last in memory and zero behind each row's valid length.
    """
    frames = x.shape[2]
    norms = [norm for pair in zip(block.adain1, block.adain2, strict=True) for norm in pair]
    projected = iter(adain_resblock.styles(block, norms, style))

    def activated(y: torch.Tensor, known: torch.Tensor, adain: Any, alpha: torch.Tensor, d: int) -> torch.Tensor:
        norm, padded = adain.norm, padded_frames(frames, d)
        affine = norm.weight, norm.bias
        return adain_channels_last(y, known, next(projected), *affine, alpha, lengths, padded, norm.eps, 0.0, run=run)

    x = x.transpose(1, 2)
    if x.stride(2) == 1:
        known = moments(x, lengths, frames, run=run)
    else:
        x, known = residual_moments(x, None, None, lengths, frames, run=run)
    stages = zip(block.convs1, block.convs2, block.adain1, block.adain2, block.alpha1, block.alpha2, strict=True)
    for conv1, conv2, adain1, adain2, alpha1, alpha2 in stages:
        d1, d2 = conv1.dilation[0], conv2.dilation[0]
        y = activated(x, known, adain1, alpha1, d1)
        y, known = conv1d(y, packed_weight(conv1), None, None, lengths, frames, d1, "views", run=run)
        y = activated(y, known, adain2, alpha2, d2)
        x, known = conv1d(y, packed_weight(conv2), conv2.bias, x, lengths, frames, d2, "views", run=run)
    return x.transpose(1, 2)
