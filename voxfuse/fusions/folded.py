"""Convolutions with weight norm folded: one weight packed beside the module instead of a normalisation every call.

The module keeps its hook or parametrisation and its parameters. One that carries anything else runs as itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.kernels._packs import pack
from voxfuse.kernels._weight_norm import class_of, fault, folded, sources


def convolve(conv: Any, x: torch.Tensor) -> torch.Tensor:
    """``conv(x)``, x [rows, channels, frames]: an nn.Conv1d or nn.ConvTranspose1d with weight norm folded.

    Any other module, and one whose weight only a call can tell, runs as itself.
    """
    kind = class_of(conv)
    weight = folded_weight(conv) if kind in (nn.Conv1d, nn.ConvTranspose1d) else None
    if weight is None or conv.padding_mode != "zeros":
        return conv(x)
    if kind is nn.Conv1d:
        return F.conv1d(x, weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    return F.conv_transpose1d(
        x, weight, conv.bias, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation
    )


def folded_weight(conv: Any) -> torch.Tensor | None:
    """The weight that a call of a convolution would use; None where it has more between than weight norm."""
    if fault(conv) is not None:
        return None
    parameters = sources(conv)
    return parameters[0] if len(parameters) == 1 else pack(conv, "folded_weight", parameters, lambda: folded(conv))


def output_lengths(conv: Any, lengths: torch.Tensor) -> torch.Tensor:
    """How many frames a convolution makes of ``lengths`` [rows]: the formulas of torch.nn's documentation."""
    stride, span = conv.stride[0], conv.dilation[0] * (conv.kernel_size[0] - 1)
    if isinstance(conv, nn.ConvTranspose1d):
        return (lengths - 1) * stride + (span + 1 + conv.output_padding[0] - 2 * conv.padding[0])
    return (lengths + (2 * conv.padding[0] - span - 1)).div(stride, rounding_mode="floor") + 1
