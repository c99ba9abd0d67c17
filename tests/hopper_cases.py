"""Arguments of the Gluon convolutions (snake_conv_pair, conv1d_snake), and where they run."""

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def pair_case(channels, taps, frames=40, rows=2):
    """x [rows, frames, channels] in fp64, weights, alpha1, bias1, alpha2, bias2."""
    x = torch.randn(rows, frames, channels, dtype=torch.float64)
    weights = torch.randn(2, channels, taps, channels, dtype=torch.float64) / (channels * taps) ** 0.5
    alphas, biases = torch.rand(2, channels).double() + 0.5, torch.randn(2, channels).double()
    return x, weights, alphas[0], biases[0], alphas[1], biases[1]


def doubles(arguments):
    return [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
