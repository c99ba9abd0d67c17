"""1-D convolution with its neighbours: y = conv(x) + bias + residual, and the moments of y for the AdaIN behind it.

Layouts: x [rows, held frames, in channels] contiguous in the layout of its plan (``_conv_plan``: as many phases as the
dilation d, zeros around each), zero behind each row's valid length; weight [g · out channels, taps', g · in channels]
contiguous for g frames as one (``packed_weight``); bias [out channels]; residual [rows, frames, out channels]; moments
as in ``voxfuse.kernels.moments``. Padding keeps the length: d·(taps − 1)/2 frames of zeros on both sides, taps odd.
With bias or residual y is [rows, frames, out channels], zero behind the valid length; with neither it is [rows, at
least the padded frames, out channels] in d phases, as cuDNN left it.
Contract: same-precision; products as ``torch.backends.cudnn`` is set (TF32 by default, as upstream's).
Envelope: fp32, fp16, bf16, one type for all; stride 1, one group; inference only.

Strategies, by name in ``STRATEGIES``; both are cuDNN on channels-last memory without bias and dilation, then one pass
for bias, residual and moments. They differ in the axis of the image along which the taps lie, for which cuDNN has
different kernels: up to four times apart on an H200. ``_conv_plan.fastest`` is what was measured there.
- ``taps_first``: images of padded / d × 1.
- ``taps_last``: images of 1 × padded / d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.kernels._conv_plan import Plan, fastest
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._packs import pack
from voxfuse.kernels._phases import Layout, from_phases, to_phases
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


def packed_weight(
    conv: nn.Conv1d, in_channels: int | None = None, out_channels: int | None = None, together: int = 1
) -> torch.Tensor:
    """The weight of a Conv1d for ``together`` frames g as one, [g · out, taps', g · in] (``_conv_plan``), with weight
    norm folded.

    Zeros fill up to ``in_channels`` and ``out_channels``: cuDNN's fast kernels want multiples.
    """
    shape = out_channels or conv.out_channels, in_channels or conv.in_channels
    name = f"channels last {shape}, {together} as one"
    return pack(conv, name, sources(conv), lambda: grouped(_channels_last(folded(conv), shape), together))


def _channels_last(weight: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    out_channels, in_channels, _ = weight.shape
    spare = (0, shape[1] - in_channels, 0, 0, 0, shape[0] - out_channels)
    return F.pad(weight.permute(0, 2, 1), spare).contiguous()


def grouped(weight: torch.Tensor, together: int) -> torch.Tensor:
    """weight [out, taps, in] for ``together`` frames g as one: block Toeplitz [g · out, taps', g · in]."""
    out_channels, taps, in_channels = weight.shape
    spans = Plan("", together).spans(taps)
    blocks = weight.new_zeros(together, out_channels, spans * together, in_channels)
    for frame in range(together):
        blocks[frame, :, frame : frame + taps] = weight
    return blocks.view(together * out_channels, spans, together * in_channels)


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


def convolved(conv: Any, x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A convolution without its bias on x [rows, held frames, in channels] contiguous, in the plan's ``layout``.

    The result [rows, frames, out channels] has its dilation's phases, each with at least as many frames as were asked
    of the layout.
    """
    weight = packed_weight(conv, together=plan.together)
    return _planned(x, weight, plan, conv.kernel_size[0], taps_before(conv), conv.dilation[0])


def _planned(x: torch.Tensor, weight: torch.Tensor, plan: Plan, taps: int, before: int, dilation: int) -> torch.Tensor:
    rows, held, channels = x.shape
    groups = x.view(rows, held // plan.together, plan.together * channels)
    y = STRATEGIES[plan.axis](groups, weight, dilation, plan.padding(taps, before))
    return y.view(rows, y.shape[1] * plan.together, y.shape[2] // plan.together)


def convolved_plain(conv: Any, x: torch.Tensor, weight: torch.Tensor, axis: str) -> torch.Tensor:
    """A convolution without dilation and its bias on x [rows, frames, in channels] contiguous, with no zeros around it.

    cuDNN pads both sides alike, so what is causal pads all of its taps on both and has as many frames more, which are
    left out: slower than ``convolved``, for an input whose producer writes no zeros.
    """
    before, frames = taps_before(conv), x.shape[1]
    padding = max(before, weight.shape[1] - 1 - before)
    return STRATEGIES[axis](x, weight, 1, padding)[:, padding - before :][:, :frames]


def planned(conv: Any, rows: int, frames: int) -> tuple[Plan, Layout]:
    """The fastest plan for a convolution of [rows, frames, in channels], and how its input must lie for it."""
    plan = fastest(rows, frames, conv.in_channels, conv.kernel_size[0], conv.dilation[0])
    return plan, layout_for(conv, plan, frames)


def layout_for(conv: Any, plan: Plan, frames: int) -> Layout:
    """How the input of ``convolved`` must lie."""
    return plan.layout(conv.kernel_size[0], taps_before(conv), conv.dilation[0], frames)


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
    taps: int,
    axis: str,
    together: int,
) -> str | None:
    """Why a call is outside the envelope, or None. Raises KeyError for an unknown strategy."""
    if axis not in STRATEGIES:
        raise KeyError(f"no conv1d strategy named {axis!r}; known: {', '.join(STRATEGIES)}")
    if taps % 2 == 0 or together < 1:
        return f"expected odd taps and at least one frame as one, got {taps} and {together}"
    plan = Plan(axis, together)
    held = plan.layout(taps, taps // 2, dilation, frames).held(frames)
    if x.dim() != 3 or not x.is_contiguous() or x.shape[1] != held:
        return f"x must be contiguous [rows, {held}, channels], got {tuple(x.shape)}"
    given = plan.spans(taps), together * x.shape[2]
    if weight.dim() != 3 or not weight.is_contiguous() or weight.shape[1:] != given or weight.shape[0] % together:
        return f"weight must be contiguous [{together} · out, {given[0]}, {given[1]}], got {tuple(weight.shape)}"
    if weight.dtype != x.dtype or x.dtype not in FLOAT_TYPES:
        return f"dtypes must be one of fp32, fp16 and bf16, the same for all, got {x.dtype} and {weight.dtype}"
    return neighbours_unsupported((x.shape[0], frames, weight.shape[0] // together), x.dtype, bias, residual, lengths)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
    taps: int,
    axis: str,
    together: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Upstream's dilated convolution, then the reference of the neighbours."""
    before = taps // 2
    lead = Plan(axis, together).layout(taps, before, dilation, frames).lead
    plain = from_phases(x, frames, dilation, lead).transpose(1, 2)
    alone = weight[: weight.shape[0] // together].view(-1, weight.shape[1] * together, x.shape[2])[:, :taps]
    y = F.conv1d(plain, alone.transpose(1, 2), bias, padding=dilation * before, dilation=dilation).transpose(1, 2)
    if bias is None and residual is None:
        rest = _held(x, weight, dilation, taps, together) // dilation + -frames // dilation
        return to_phases(y, dilation, 0, rest), moments_reference(y, lengths, frames, 1)
    return residual_moments_reference(y, None, residual, lengths, frames, 1)


def _held(x: torch.Tensor, weight: torch.Tensor, dilation: int, taps: int, together: int) -> int:
    """How many frames the phases of the bare result have together."""
    more = 2 * Plan("", together).padding(taps, taps // 2) + 1 - weight.shape[1]
    return x.shape[1] + dilation * together * more


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
    taps: int,
    axis: str,
    together: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    held = _held(x, weight, dilation, taps, together) if bias is None and residual is None else frames
    y = x.new_empty(x.shape[0], held, weight.shape[0] // together)
    return y, empty_moments(y, frames)


@fused_op(
    "conv1d",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? lengths, int frames, int dilation, int taps,"
    " str axis, int together) -> (Tensor, Tensor)",
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
    taps: int,
    axis: str,
    together: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and its moments; shapes and formula in the module's docstring. Raises KeyError for an unknown axis."""
    if x.shape[0] * frames * weight.shape[0] == 0:
        return _fake(x, weight, bias, residual, lengths, frames, dilation, taps, axis, together)
    y = _planned(x, weight, Plan(axis, together), taps, taps // 2, dilation)
    if bias is None and residual is None:
        return y, moments.launch(y, lengths, frames, dilation)
    return residual_moments.launch(y, bias, residual, lengths, frames, dilation)
