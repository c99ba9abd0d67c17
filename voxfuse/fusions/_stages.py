"""What the stages of a HiFi-GAN-like generator share between their convolutions, channels last."""

from __future__ import annotations

import torch

from voxfuse.kernels._op import Run
from voxfuse.kernels.mean_act import mean_act


def mean_activated(parts: list[torch.Tensor], lengths: torch.Tensor | None, slope: float, run: Run) -> torch.Tensor:
    """LeakyReLU of the mean, summed from the left; a zero tail. All [rows, frames, channels] contiguous."""
    total, *rest = parts
    while len(rest) > 2:
        total = total + rest.pop(0)
    first, second, third = (None if part is None else part.transpose(1, 2) for part in (total, *rest, None, None)[:3])
    return mean_act(first, second, third, lengths, float(len(parts)), slope, run=run).transpose(1, 2)


def reflected(x: torch.Tensor) -> torch.Tensor:
    """ReflectionPad1d((1, 0)) of what ``polyphase.upsample`` gave, whose storage has room for a frame in front."""
    rows, frames, channels = x.shape
    longer = x.as_strided((rows, frames + 1, channels), x.stride(), x.storage_offset() - x.stride(1))
    longer[:, 0] = x[:, 1]
    return longer
