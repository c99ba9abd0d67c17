"""Convolutions with weight norm folded: one weight packed beside the module instead of a normalisation every call.

The module keeps its old-style ``torch.nn.utils.weight_norm`` hook and its parameters. One that carries any other hook
runs as itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from voxfuse.kernels._packs import pack


def convolve(conv: Any, x: torch.Tensor) -> torch.Tensor:
    """``conv(x)``, x [rows, channels, frames]: an nn.Conv1d or nn.ConvTranspose1d with weight norm folded.

    Any other module, and one whose weight only a call can tell, runs as itself.
    """
    kind = type(conv)
    weight = folded_weight(conv) if kind in (nn.Conv1d, nn.ConvTranspose1d) else None
    if weight is None or conv.padding_mode != "zeros":
        return conv(x)
    if kind is nn.Conv1d:
        return F.conv1d(x, weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    return F.conv_transpose1d(
        x, weight, conv.bias, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation
    )


def folded_weight(conv: Any) -> torch.Tensor | None:
    """The weight that a call of a convolution would use; None where it has hooks other than weight norm's."""
    hooks = list(conv._forward_pre_hooks.values())
    if conv._forward_hooks or "forward" in vars(conv) or len(hooks) > 1:
        return None
    if not hooks:
        return conv.weight
    norm = hooks[0]
    if type(norm) is not WeightNorm or norm.name != "weight":
        return None
    g, v = conv.weight_g, conv.weight_v
    return pack(conv, "folded_weight", (g, v), lambda: torch._weight_norm(v, g, norm.dim))


def output_lengths(conv: Any, lengths: torch.Tensor) -> torch.Tensor:
    """How many frames a convolution makes of ``lengths`` [rows]: the formulas of torch.nn's documentation."""
    stride, span = conv.stride[0], conv.dilation[0] * (conv.kernel_size[0] - 1)
    if isinstance(conv, nn.ConvTranspose1d):
        return (lengths - 1) * stride + (span + 1 + conv.output_padding[0] - 2 * conv.padding[0])
    return (lengths + (2 * conv.padding[0] - span - 1)).div(stride, rounding_mode="floor") + 1
