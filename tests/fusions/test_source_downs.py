"""Strided convolutions of one spectrum as convolutions of frames side by side, against torch's in fp64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.fusions._source_downs import downsampled, fault, room


class CausalConv1dDownSample(nn.Conv1d):
    """As CosyVoice3's: the zeros in front are made by a copy."""

    def __init__(self, channels, out, taps, stride):
        super().__init__(channels, out, taps, stride)
        self.causal_padding = stride - 1

    def forward(self, x):
        return super().forward(F.pad(x, (self.causal_padding, 0)))


def plain(strides, channels):
    """As CosyVoice2 and Chatterbox build them, from NumPy's integers."""
    sizes = [(1, 1, 0) if s == 1 else (2 * s, s, s // 2) for s in strides]
    return [nn.Conv1d(channels, 5, *map(np.int64, size)) for size in sizes]


def causal(strides, channels):
    return [nn.Conv1d(channels, 5, 1) if s == 1 else CausalConv1dDownSample(channels, 5, 2 * s, s) for s in strides]


@pytest.mark.parametrize("kind", [plain, causal])
@pytest.mark.parametrize("strides", [(15, 3, 1), (3, 1), (8, 1), (5,)])
@torch.no_grad()
def test_all_stages_read_one_spectrum(kind, strides, poisoned_empty):
    downs = [down.double() for down in kind(strides, 6)]
    assert fault(downs) is None
    for frames in (hop * strides[0] + 1 for hop in (1, 2, 7)):
        x = torch.randn(2, 6, frames, dtype=torch.float64)
        lead, held, channels = room(downs, frames)
        assert {type(size) for size in (lead, held, channels)} == {int}, "what kernels take are Python's integers"
        assert channels == 8 and all(held % stride == 0 for stride in strides)
        spectrum = F.pad(x.transpose(1, 2), (0, channels - 6, lead, held - lead - frames)).contiguous()
        for down in downs:
            expected = down(x) - down.bias[:, None]
            torch.testing.assert_close(downsampled(down, spectrum, lead, frames).transpose(1, 2), expected)


def test_at_the_released_strides_hardly_a_frame_is_added():
    """15 in front at most, and what fills up the last group: no pass over memory is longer by more than a permille."""
    for kind in (plain, causal):
        lead, held, channels = room(kind((15, 3, 1), 18), 60_001)
        assert lead < 15 and held <= 60_030 and channels == 24


def test_paddings_that_do_not_agree_are_refused():
    downs = [nn.Conv1d(6, 5, 8, 4, padding=1), nn.Conv1d(6, 5, 4, 2, padding=0)]
    assert "agree modulo the strides, got [(4, 1), (2, 0)]" in fault(downs)
    assert "expected a plain Conv1d" in fault([nn.Conv1d(6, 6, 3, groups=2)])
