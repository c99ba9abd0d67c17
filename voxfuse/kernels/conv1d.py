"""1-D convolution with its neighbours: y = conv(x) + bias + residual, and the moments of y for the AdaIN behind it.

Layouts: x [rows, padded frames, in channels] contiguous, in as many phases as the dilation d (``_phases``), zero behind
each row's valid length; weight [out channels, taps, in channels] contiguous (``packed_weight``); bias [out channels];
residual [rows, frames, out channels]; moments as in ``voxfuse.kernels.moments``. Padding keeps the length:
d·(taps − 1)/2 frames of zeros on both sides, taps odd. With bias or residual y is [rows, frames, out channels], zero
behind the valid length; with neither it is [rows, padded frames, out channels] in d phases, as cuDNN left it.
Contract: same-precision; products as ``torch.backends.cudnn`` is set (TF32 by default, as upstream's).
Envelope: fp32, fp16, bf16, one type for all; stride 1, one group; inference only.

Strategies, by name in ``STRATEGIES``; both are cuDNN on channels-last memory without bias and dilation, then one pass
for bias, residual and moments. They differ in the axis of the image along which the taps lie, for which cuDNN has
different kernels: up to four times apart on an H200. ``fastest`` is what was measured there.
- ``taps_first``: images of padded / d × 1.
- ``taps_last``: images of 1 × padded / d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.kernels._op import fused_op
from voxfuse.kernels._packs import pack
from voxfuse.kernels._phases import from_phases, padded_frames, to_phases
from voxfuse.kernels._weight_norm import class_of, fault, folded, sources
from voxfuse.kernels.moments import (
    FLOAT_TYPES,
    empty_moments,
    moments,
    moments_reference,
    neighbours_unsupported,
    residual_moments,
)
from voxfuse.kernels.moments import reference as residual_moments_reference


def conv_unsupported(conv: Any) -> str | None:
    """Why a convolution module cannot run from a packed weight, or None: a Conv1d, or CosyVoice3's CausalConv1d."""
    kind = class_of(conv)
    if kind is not nn.Conv1d and kind.__name__ != "CausalConv1d":
        return f"the convolution is {kind.__name__}, expected Conv1d or CausalConv1d"
    (taps,), (stride,), (dilation,) = conv.kernel_size, conv.stride, conv.dilation
    span = dilation * (taps - 1)
    if (stride, conv.groups, conv.padding_mode) != (1, 1, "zeros") or taps % 2 == 0:
        return f"expected odd taps, stride 1, one group and zero padding, got {conv}"
    if kind is nn.Conv1d and conv.padding != (span // 2,):
        return f"expected padding that keeps the length, got {conv}"
    if kind is not nn.Conv1d and (conv.causal_padding, conv.padding) != (span, (0,)):
        return f"expected {span} frames of padding on one side, got {conv.causal_padding} in {conv}"
    if getattr(conv, "causal_type", "left") == "right" and dilation > 1:
        return f"expected no dilation where the padding is on the right, got {conv}"
    return fault(conv)


def taps_before(conv: Any) -> int:
    """How many taps of a convolution without ``conv_unsupported`` lie before the frame that it writes."""
    taps, side = conv.kernel_size[0], getattr(conv, "causal_type", "both")
    return {"left": taps - 1, "right": 0, "both": taps // 2}[side]


def packed_weight(conv: nn.Conv1d, in_channels: int | None = None, out_channels: int | None = None) -> torch.Tensor:
    """The weight of a Conv1d as [out, taps, in], with weight norm folded.

    Zeros fill up to ``in_channels`` and ``out_channels``: cuDNN's fast kernels want multiples.
    """
    shape = out_channels or conv.out_channels, in_channels or conv.in_channels
    return pack(conv, f"channels last {shape}", sources(conv), lambda: _channels_last(folded(conv), shape))


def _channels_last(weight: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    out_channels, in_channels, _ = weight.shape
    spare = (0, shape[1] - in_channels, 0, 0, 0, shape[0] - out_channels)
    return F.pad(weight.permute(0, 2, 1), spare).contiguous()


def fastest(rows: int, in_channels: int, taps: int, dilation: int) -> str:
    """The strategy for a shape, as measured on an H200 (fp32 with TF32; 1 to 8 rows of 2.5 to 10 s of Kokoro)."""
    images = rows * dilation
    if images <= 2 or in_channels >= 512 or (in_channels <= 128 and taps >= 11):
        return "taps_last"
    return "taps_first"


def _taps_first(x: torch.Tensor, weight: torch.Tensor, dilation: int, padding: int | None = None) -> torch.Tensor:
    rows, padded, channels = x.shape
    padding = weight.shape[1] // 2 if padding is None else padding
    image = x.view(rows * dilation, padded // dilation, 1, channels).permute(0, 3, 1, 2)
    y = F.conv2d(image, weight.unsqueeze(2).permute(0, 3, 1, 2), padding=(padding, 0))
    return y.permute(0, 2, 3, 1).reshape(rows, dilation * y.shape[2], weight.shape[0])


def _taps_last(x: torch.Tensor, weight: torch.Tensor, dilation: int, padding: int | None = None) -> torch.Tensor:
    rows, padded, channels = x.shape
    padding = weight.shape[1] // 2 if padding is None else padding
    image = x.view(rows * dilation, 1, padded // dilation, channels).permute(0, 3, 1, 2)
    y = F.conv2d(image, weight.unsqueeze(1).permute(0, 3, 1, 2), padding=(0, padding))
    return y.permute(0, 2, 3, 1).reshape(rows, dilation * y.shape[3], weight.shape[0])


STRATEGIES: dict[str, Callable[..., torch.Tensor]] = {"taps_first": _taps_first, "taps_last": _taps_last}


def convolved(conv: Any, x: torch.Tensor, weight: torch.Tensor, strategy: str) -> torch.Tensor:
    """A convolution without its bias on x [rows, padded frames, in channels] contiguous in its dilation's phases.

    cuDNN pads both sides alike, so what is causal pads all of its taps on both and has as many frames more: behind the
    others where the padding is on the left, in front of them, and left out, on the right. Each phase of the result has
    y.shape[1] / dilation frames, at least as many as x.
    """
    before, spare = taps_before(conv), weight.shape[1] - 1
    padding = max(before, spare - before)
    y = STRATEGIES[strategy](x, weight, conv.dilation[0], padding)
    return y[:, padding - before :] if padding > before else y


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
    strategy: str,
) -> str | None:
    """Why a call is outside the envelope, or None. Raises KeyError for an unknown strategy."""
    if strategy not in STRATEGIES:
        raise KeyError(f"no conv1d strategy named {strategy!r}; known: {', '.join(STRATEGIES)}")
    if x.dim() != 3 or not x.is_contiguous() or x.shape[1] != padded_frames(frames, dilation):
        return f"x must be contiguous [rows, {padded_frames(frames, dilation)}, channels], got {tuple(x.shape)}"
    if weight.dim() != 3 or not weight.is_contiguous() or weight.shape[2] != x.shape[2] or weight.shape[1] % 2 == 0:
        return f"weight must be contiguous [out, odd taps, {x.shape[2]}], got {tuple(weight.shape)}"
    if weight.dtype != x.dtype or x.dtype not in FLOAT_TYPES:
        return f"dtypes must be one of fp32, fp16 and bf16, the same for all, got {x.dtype} and {weight.dtype}"
    return neighbours_unsupported((x.shape[0], frames, weight.shape[0]), x.dtype, bias, residual, lengths)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
    strategy: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's dilated convolution, then the reference of the neighbours."""
    padding = dilation * (weight.shape[1] - 1) // 2
    plain = from_phases(x, frames, dilation).transpose(1, 2)
    y = F.conv1d(plain, weight.transpose(1, 2), bias, padding=padding, dilation=dilation).transpose(1, 2)
    if bias is None and residual is None:
        return to_phases(y, dilation), moments_reference(y, lengths, frames, 1)
    return residual_moments_reference(y, None, residual, lengths, frames, 1)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
    strategy: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.new_empty(x.shape[0], x.shape[1] if bias is None and residual is None else frames, weight.shape[0])
    return y, empty_moments(y, frames)


@fused_op(
    "conv1d",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? lengths, int frames, int dilation, str strategy)"
    " -> (Tensor, Tensor)",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
    strategy: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and its moments; shapes and formula in the module's docstring. Raises KeyError for an unknown strategy."""
    if x.shape[0] * frames * weight.shape[0] == 0:
        return _fake(x, weight, bias, residual, lengths, frames, dilation, strategy)
    y = STRATEGIES[strategy](x, weight, dilation)
    if bias is None and residual is None:
        return y, moments.launch(y, lengths, frames, dilation)
    return residual_moments.launch(y, bias, residual, lengths, frames, dilation)
