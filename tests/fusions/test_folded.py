"""Folded convolutions against the modules themselves."""

import pytest
import torch
from torch import nn
from torch.nn.utils import remove_weight_norm, weight_norm

from voxfuse.fusions.folded import convolve, folded_weight, output_lengths

CONVOLUTIONS = [
    lambda: nn.Conv1d(4, 6, 7, padding=9, dilation=3),
    lambda: nn.Conv1d(1, 1, 3, stride=2, padding=1),
    lambda: nn.Conv1d(4, 4, 5, padding=2, groups=2, bias=False),
    lambda: nn.Conv1d(4, 4, 5, padding=2, padding_mode="reflect"),
    lambda: nn.ConvTranspose1d(4, 2, 20, 10, padding=5),
    lambda: nn.ConvTranspose1d(4, 4, 3, stride=2, groups=4, padding=1, output_padding=1),
]


@torch.no_grad()
@pytest.mark.parametrize("make", CONVOLUTIONS)
@pytest.mark.parametrize("normed", [True, False])
def test_a_folded_convolution_equals_its_module(make, normed):
    conv = weight_norm(make()) if normed else make()
    if normed:
        conv.weight_g.mul_(torch.rand_like(conv.weight_g) + 0.5)
    x = torch.randn(2, conv.in_channels, 23)
    torch.testing.assert_close(convolve(conv, x), conv(x), rtol=0, atol=0)
    lengths = torch.tensor([23, 9])
    assert output_lengths(conv, lengths).tolist() == [conv(x[:1, :, :n]).shape[2] for n in (23, 9)]


@torch.no_grad()
def test_new_weights_removal_and_other_hooks():
    conv = weight_norm(nn.Conv1d(3, 3, 3))
    x = torch.randn(1, 3, 9)
    packed = folded_weight(conv)
    assert folded_weight(conv) is packed
    conv.weight_g.mul_(2)
    torch.testing.assert_close(convolve(conv, x), conv(x))
    seen = []
    hook = conv.register_forward_pre_hook(lambda *_: seen.append(1))
    assert folded_weight(conv) is None
    convolve(conv, x)
    assert seen == [1], "a hook of the user's must run"
    hook.remove()
    remove_weight_norm(conv)
    torch.testing.assert_close(convolve(conv, x), conv(x))
