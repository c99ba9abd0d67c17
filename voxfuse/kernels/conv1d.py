"""1-D convolution with its neighbours: y = conv(x) + bias + residual, and the moments of y for the AdaIN behind it.

Layouts: x [rows, padded frames, in channels] contiguous, zero behind each row's valid length, where ``padded`` is the
least multiple of the dilation d that holds ``frames``; weight [out channels, taps, in channels] contiguous
(``packed_weight``); bias [out channels]; residual and y [rows, frames, out channels]; moments as in
``voxfuse.kernels.moments``. Padding keeps the length: d·(taps − 1)/2 frames of zeros on both sides, taps odd.
With neither bias nor residual, y is not masked behind the valid length (its moments are).
Contract: same-precision; products as ``torch.backends.cudnn`` is set (TF32 by default, as upstream's).
Envelope: fp32, fp16, bf16, one type for all; stride 1, one group; inference only.

Strategies, by name in ``STRATEGIES``:
- ``views``: cuDNN on channels-last memory without bias, dilation 1 over a (padded / d, d) view, taps along the first
  axis (on an H200 cuDNN's dilated kernels take up to twice as long); then one pass for bias, residual and moments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from voxfuse.kernels._op import fused_op
from voxfuse.kernels._packs import pack
from voxfuse.kernels.moments import FLOAT_TYPES, empty_moments, moments, neighbours_unsupported, residual_moments
from voxfuse.kernels.moments import reference as residual_moments_reference


def padded_frames(frames: int, dilation: int) -> int:
    """The least multiple of the dilation that holds ``frames``."""
    return -(-frames // dilation) * dilation


def conv_unsupported(conv: nn.Module) -> str | None:
    """Why a convolution module cannot run from a packed weight, or None."""
    if type(conv) is not nn.Conv1d:
        return f"the convolution is {type(conv).__name__}, expected Conv1d"
    (taps,), (stride,), (dilation,) = conv.kernel_size, conv.stride, conv.dilation
    if (stride, conv.groups, conv.padding_mode) != (1, 1, "zeros") or taps % 2 == 0:
        return f"expected odd taps, stride 1, one group and zero padding, got {conv}"
    if conv.padding != (dilation * (taps - 1) // 2,):
        return f"expected padding that keeps the length, got {conv}"
    strange = [hook for hook in conv._forward_pre_hooks.values() if not isinstance(hook, WeightNorm)]
    if strange or conv._forward_hooks or len(conv._forward_pre_hooks) > 1 or "forward" in vars(conv):
        return f"the convolution has hooks or a forward of its own besides weight norm: {conv}"
    return None


def packed_weight(conv: nn.Conv1d) -> torch.Tensor:
    """The weight of a Conv1d as [out, taps, in], with weight norm folded as its hook would: g · v / ‖v‖."""
    norm = next((hook for hook in conv._forward_pre_hooks.values() if isinstance(hook, WeightNorm)), None)
    if norm is None:
        return pack(conv, "channels_last", [conv.weight], lambda: _channels_last(conv.weight))
    g, v = getattr(conv, f"{norm.name}_g"), getattr(conv, f"{norm.name}_v")
    return pack(conv, "channels_last", [g, v], lambda: _channels_last(norm.compute_weight(conv)))


def _channels_last(weight: torch.Tensor) -> torch.Tensor:
    return weight.permute(0, 2, 1).contiguous()


def _convolved(x: torch.Tensor, weight: torch.Tensor, dilation: int) -> torch.Tensor:
    """Bare convolution of x [rows, padded, in channels] on its (padded / d, d) view: [rows, padded, out channels]."""
    rows, padded, channels = x.shape
    image = x.view(rows, padded // dilation, dilation, channels).permute(0, 3, 1, 2)
    kernel = weight.unsqueeze(2).permute(0, 3, 1, 2)
    y = F.conv2d(image, kernel, padding=(weight.shape[1] // 2, 0))
    return y.permute(0, 2, 3, 1).reshape(rows, padded, weight.shape[0])


def _views(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    lengths: torch.Tensor | None,
    frames: int,
    dilation: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = _convolved(x, weight, dilation)
    if bias is None and residual is None:
        return y[:, :frames], moments.launch(y, lengths, frames)
    return residual_moments.launch(y, bias, residual, lengths, frames)


STRATEGIES: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {"views": _views}


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
    y = F.conv1d(x[:, :frames].transpose(1, 2), weight.transpose(1, 2), bias, padding=padding, dilation=dilation)
    return residual_moments_reference(y.transpose(1, 2), None, residual, lengths, frames)


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
    bare = bias is None and residual is None
    y = x.new_empty(x.shape[0], x.shape[1] if bare else frames, weight.shape[0])[:, :frames]
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
    """y [rows, frames, out channels] and its moments; shapes and formula in the module's docstring."""
    if x.shape[0] * frames * weight.shape[0] == 0:
        y = x.new_empty(x.shape[0], frames, weight.shape[0])
        return y, empty_moments(y, frames)
    return STRATEGIES[strategy](x, weight, bias, residual, lengths, frames, dilation)
