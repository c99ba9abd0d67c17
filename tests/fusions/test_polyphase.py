"""Transposed convolutions channels last against torch's own in fp64."""

import copy

import pytest
import torch
from torch import nn

from voxfuse.fusions.polyphase import unsupported, upsample, upsample_each_channel


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def normed(conv):
    conv = nn.utils.weight_norm(conv)
    conv.weight_g.uniform_(0.5, 2)
    return conv


@pytest.mark.parametrize(
    ("taps", "stride", "padding", "output_padding"),
    [(20, 10, 5, 0), (12, 6, 3, 0), (3, 2, 1, 1), (7, 3, 2, 1), (4, 4, 0, 0), (2, 3, 1, 0)],
)
def test_every_stride_and_length(taps, stride, padding, output_padding):
    conv = normed(nn.ConvTranspose1d(6, 4, taps, stride, padding=padding, output_padding=output_padding))
    assert unsupported(conv) is None
    for frames in (2, 3, 11):
        x = torch.randn(2, 6, frames)
        y = upsample(conv, x.transpose(1, 2).contiguous())
        expected = copy.deepcopy(conv).double()(x.double())
        torch.testing.assert_close((y + conv.bias).transpose(1, 2).double(), expected, rtol=1e-5, atol=1e-5)
        assert y.storage_offset() == padding * y.stride(1), "no room in front of the result"


@pytest.mark.parametrize("output_padding", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_each_channel_by_itself(bias, output_padding):
    conv = normed(nn.ConvTranspose1d(5, 5, 3, 2, padding=1, output_padding=output_padding, groups=5, bias=bias))
    assert unsupported(conv) is None
    for frames in (1, 2, 9):
        x = torch.randn(2, 5, frames)
        y = upsample_each_channel(conv, nn.functional.pad(x.transpose(1, 2), (0, 3)).contiguous())
        torch.testing.assert_close(y[:, :, :5].transpose(1, 2), conv(x))
        assert torch.all(y[:, :, 5:] == 0)


def test_new_weights_are_packed_anew():
    conv = normed(nn.ConvTranspose1d(4, 3, 4, 2, padding=1))
    x = torch.randn(1, 4, 5)
    upsample(conv, x.transpose(1, 2).contiguous())
    conv.weight_g.mul_(3)
    y = upsample(conv, x.transpose(1, 2).contiguous()) + conv.bias
    torch.testing.assert_close(y.transpose(1, 2), conv(x))


def test_what_does_not_fit_is_refused_with_the_reason():
    assert "expected ConvTranspose1d or CausalConv1dUpsample, got Conv1d" in unsupported(nn.Conv1d(2, 2, 3))
    assert "one group" in unsupported(nn.ConvTranspose1d(4, 4, 3, 2, groups=2))
    assert "one group" in unsupported(nn.ConvTranspose1d(4, 4, 3, 2, dilation=2))
    assert "3 taps" in unsupported(nn.ConvTranspose1d(4, 4, 5, 2, groups=4))
    hooked = nn.ConvTranspose1d(4, 4, 4, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert "hooks" in unsupported(hooked)
