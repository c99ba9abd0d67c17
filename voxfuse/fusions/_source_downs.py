"""The strided convolutions that bring a source's spectrum to the rates of a vocoder's stages, as convolutions without
stride: s frames side by side are one of s times the channels, of which a filter of K taps meets ceil(K / s).

All stages read one spectrum [rows, held, channels], channels last (kernels/stft.py), from views of it; on an H200 what
cuDNN has for 18 channels and a stride is an fp32 kernel without tensor cores. A stage whose padding in front is p finds
its frames in groups of s where ``lead``, the frames of zeros in front of the spectrum, is p modulo s. Padding behind is
zeros of the spectrum's own tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.fusions.folded import folded_weight
from voxfuse.kernels._packs import pack
from voxfuse.kernels._weight_norm import class_of
from voxfuse.kernels.conv1d import STRATEGIES

CHANNEL_MULTIPLE = 8  # cuDNN's kernels for tensor cores want multiples of the channels


class Room(NamedTuple):
    """What a spectrum needs around it: frames of zeros in front, frames and channels in all."""

    lead: int
    held: int
    channels: int


def fault(downs: Sequence[Any]) -> str | None:
    """Why convolutions cannot read one spectrum, or None."""
    for down in downs:
        kind, (taps,), (stride,) = class_of(down).__name__, down.kernel_size, down.stride
        single = (down.groups, down.dilation, down.padding_mode) == (1, (1,), "zeros")
        causal = down.padding == (0,) and (
            (kind, down.__dict__.get("causal_padding"), taps) == ("CausalConv1dDownSample", stride - 1, 2 * stride)
            or (kind, taps, stride) == ("CausalConv1d", 1, 1)
        )
        if not single or folded_weight(down) is None or not (class_of(down) is nn.Conv1d or causal):
            return f"expected a plain Conv1d of the source's spectrum, or a causal one that halves its taps, got {down}"
    if _lead(downs) is None:
        return f"expected paddings that agree modulo the strides, got {[(_stride(d), _padding(d)) for d in downs]}"
    return None


def room(downs: Sequence[Any], frames: int) -> Room:
    """The room for a spectrum of ``frames`` frames that convolutions without ``fault`` read."""
    lead = _lead(downs)
    assert lead is not None, "asked before: fault"
    ends = [lead + frames]
    for down in downs:
        stride = _stride(down)
        ends.append(lead - _padding(down) + stride * (_frames(down, frames) - 1 + _spans(down)))
    together = math.lcm(*map(_stride, downs))
    channels = -(-downs[0].in_channels // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE
    return Room(lead, -(-max(ends) // together) * together, channels)


def downsampled(down: Any, spectrum: torch.Tensor, lead: int, frames: int) -> torch.Tensor:
    """A convolution without its bias on a spectrum of ``frames`` frames in its ``room``: [rows, frames', out channels],
    a view."""
    rows, held, channels = spectrum.shape
    stride, weight = _stride(down), folded_weight(down)
    assert weight is not None, "asked before: fault"
    name = f"{stride} frames side by side, {channels} channels"
    packed = pack(down, name, [weight], lambda: _packed(weight, stride, channels))
    groups = spectrum.view(rows, held // stride, stride * channels)
    first = (lead - _padding(down)) // stride
    return STRATEGIES["taps_last"](groups, packed, 1, 0)[:, first : first + _frames(down, frames)]


def _packed(weight: torch.Tensor, stride: int, channels: int) -> torch.Tensor:
    """[out, in, taps] → [out, taps', stride · channels]."""
    out_channels, in_channels, taps = weight.shape
    spans = -(-taps // stride)
    spare = (0, channels - in_channels, 0, spans * stride - taps)
    return F.pad(weight.permute(0, 2, 1), spare).reshape(out_channels, spans, stride * channels).contiguous()


def _lead(downs: Sequence[Any]) -> int | None:
    """The fewest frames of zeros in front that suit all, or None."""
    together, least = math.lcm(*map(_stride, downs)), max(_padding(down) for down in downs)
    suit = (n for n in range(least, least + together) if all((n - _padding(d)) % _stride(d) == 0 for d in downs))
    return next(suit, None)


def _stride(down: Any) -> int:
    return int(down.stride[0])  # a NumPy integer in CosyVoice2, as are padding and taps


def _padding(down: Any) -> int:
    """Frames of padding in front."""
    return int(down.padding[0] if class_of(down) is nn.Conv1d else down.causal_padding)


def _frames(down: Any, frames: int) -> int:
    """What it makes of ``frames``. Causal ones have no padding behind; as much as in front makes no frame more (the
    spectrum has one more than a multiple of the stride)."""
    return (frames + 2 * _padding(down) - int(down.kernel_size[0])) // _stride(down) + 1


def _spans(down: Any) -> int:
    return -(-int(down.kernel_size[0]) // _stride(down))
