"""AdaIN residual blocks (StyleTTS 2, Kokoro) channels last: each convolution with its pointwise neighbours.

Between two convolutions stand two passes: bias, residual and moments in the one, AdaIN and activation in the other. A
bias in front of an AdaIN is left out: the instance norm takes any constant of a channel away again. Parameters stay as
upstream made them; folded and repacked weights live beside the modules, zeros filling them up to channels that cuDNN
has fast kernels for. Source: AdaINResBlock1 and AdainResBlk1d in kokoro/istftnet.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from voxfuse.fusions import adain_resblock
from voxfuse.fusions.adain_resblock import padded_styles, snake_norms
from voxfuse.fusions.folded import output_lengths
from voxfuse.fusions.polyphase import upsample_each_channel
from voxfuse.kernels._conv_plan import LAST, Plan
from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels._phases import PLAIN, Layout
from voxfuse.kernels.adain_channels_last import adain_channels_last
from voxfuse.kernels.conv1d import STRATEGIES, conv1d, conv_unsupported, packed_weight, planned
from voxfuse.kernels.mean_act import mean_act
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


def run_block(block: Any, x: torch.Tensor, style: torch.Tensor, run: Run) -> torch.Tensor:
    """AdaINResBlock1.forward: x [rows, channels, frames] in any layout, style [rows, style_dim]; the result is channels
    last in memory."""
    norms = snake_norms(block)
    projected = iter(padded_styles(block, [(norm, x.shape[1]) for norm in norms], style))
    x = x.transpose(1, 2)
    if x.stride(2) == 1:
        known = moments(x, None, x.shape[1], 1, run=run)
    else:
        x, known = residual_moments(x, None, None, None, x.shape[1], 1, run=run)
    return adain_snake_block(block, x, known, projected, None, run).transpose(1, 2)


def adain_snake_block(
    block: Any,
    x: torch.Tensor,
    known: torch.Tensor,
    projected: Iterator[torch.Tensor],
    lengths: torch.Tensor | None,
    run: Run,
) -> torch.Tensor:
    """AdaINResBlock1: three times x + conv2(snake(adain2(conv1(snake(adain1(x)))))).

    x [rows, frames, channels] contiguous, ``known`` its moments, ``projected`` the styles of ``snake_norms``,
    ``lengths`` [rows] valid frames or None. The result is like x, zero behind each row's valid length.
    """
    rows, frames, _ = x.shape
    stages = zip(block.convs1, block.convs2, block.adain1, block.adain2, block.alpha1, block.alpha2, strict=True)
    for conv1, conv2, adain1, adain2, alpha1, alpha2 in stages:
        (plan1, layout1), (plan2, layout2) = planned(conv1, rows, frames), planned(conv2, rows, frames)
        y = _activated(adain1, x, known, next(projected), alpha1, lengths, frames, 1, layout1, 0.0, run)
        y, known = _convolved(conv1, y, plan1, False, None, lengths, frames, run)
        phases = layout1.phases
        y = _activated(adain2, y, known, next(projected), alpha2, lengths, frames, phases, layout2, 0.0, run)
        x, known = _convolved(conv2, y, plan2, True, x, lengths, frames, run)
    return x


def adain_leaky_relu_block(
    block: Any,
    x: torch.Tensor,
    known: torch.Tensor,
    projected: Iterator[torch.Tensor],
    lengths: torch.Tensor | None,
    run: Run,
) -> torch.Tensor:
    """AdainResBlk1d.forward: (conv2(act(adain2(conv1(pool(act(adain1(x))))))) + shortcut(x)) / √2.

    x [rows, frames, at least the block's channels, the rest being zero] contiguous, ``known`` its moments,
    ``projected`` two styles, ``lengths`` [rows] valid frames or None. The result [rows, frames or twice as many, out
    channels] is zero behind each row's valid length.
    """
    _, frames, width = x.shape
    slope = block.actv.negative_slope
    y = _activated(block.norm1, x, known, next(projected), None, lengths, frames, 1, PLAIN, slope, run)
    shortcut = x[:, :, : block.conv1.in_channels]
    if block.learned_sc:
        shortcut = STRATEGIES["taps_last"](x, packed_weight(block.conv1x1, width), 1)
    if block.upsample_type != "none":
        y, shortcut = upsample_each_channel(block.pool, y), shortcut.repeat_interleave(2, dim=1)
        frames = y.shape[1]
        if lengths is not None:
            lengths = output_lengths(block.pool, lengths)
            y = mean_act(y.transpose(1, 2), None, None, lengths, 1.0, 1.0, run=run).transpose(1, 2)  # its bias: cleared
    y, known = _convolved(block.conv1, y, LAST, False, None, lengths, frames, run)
    y = _activated(block.norm2, y, known, next(projected), None, lengths, frames, 1, PLAIN, slope, run)
    y, _ = _convolved(block.conv2, y, LAST, True, shortcut, lengths, frames, run)
    return y * math.sqrt(0.5)


def _activated(
    adain: Any,
    x: torch.Tensor,
    known: torch.Tensor,
    style: torch.Tensor,
    alpha: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    x_phases: int,
    layout: Layout,
    slope: float,
    run: Run,
) -> torch.Tensor:
    weight, bias = adain.norm.weight, adain.norm.bias
    if (spare := x.shape[2] - adain.norm.num_features) and weight is not None:
        weight, bias = pack(
            adain, f"affine {spare}", [weight, bias], lambda: (F.pad(weight, (0, spare)), F.pad(bias, (0, spare)))
        )
    return adain_channels_last(
        x, known, style, weight, bias, alpha, lengths, frames, x_phases, *layout, adain.norm.eps, slope, run=run
    )


def _convolved(
    conv: Any,
    y: torch.Tensor,
    plan: Plan,
    biased: bool,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    run: Run,
) -> tuple[torch.Tensor, torch.Tensor]:
    weight, taps, d = packed_weight(conv, y.shape[2], together=plan.together), conv.kernel_size[0], conv.dilation[0]
    return conv1d(y, weight, conv.bias if biased else None, residual, lengths, frames, d, taps, *plan, run=run)
