"""One Snake convolution where there is no Hopper GPU: its envelope. Its reference is held against upstream's block in
test_snake_conv_pair.py, what it computes against fp64 in test_conv1d_snake_gpu.py."""

import torch

from voxfuse.kernels import _hopper_conv
from voxfuse.kernels._hopper_conv import packed
from voxfuse.kernels.conv1d_snake import conv1d_snake


def test_what_is_outside_the_envelope_is_named(monkeypatch):
    monkeypatch.setattr(_hopper_conv, "hopper", object())
    monkeypatch.setattr(_hopper_conv, "placement_fault", lambda device: None)

    def single(channels, out, residual=None):
        half = torch.randn(1, 20, channels).bfloat16()
        weight = torch.randn(out, 3, channels).bfloat16()
        return conv1d_snake.unsupported(half, weight, packed(weight), None, None, residual, None, None, 1, 1, True)

    assert single(256, 256) is None and single(64, 128) is None
    assert "channels in" in single(512, 512) and "channels in" in single(64, 96)
    assert "residual" in single(64, 64, torch.randn(1, 21, 64).bfloat16())
