"""The convolutions in Gluon where there is no Hopper GPU: reference, packing, envelope, and that they say why they fall
back. What they compute is held against fp64 in test_hopper_conv_gpu.py."""

import re

import numpy as np
import pytest
import torch

from voxfuse.kernels import _hopper_conv
from voxfuse.kernels._hopper_conv import (
    MULTIPROCESSOR_BYTES,
    PROGRAM_BYTES,
    configuration,
    halo_frames,
    packed,
)
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.conv1d_snake import conv1d_snake
from voxfuse.kernels.snake_conv_pair import packed_pair, snake_conv_pair
from voxfuse.microbench.vocoder_arms import SnakeBlock

NEEDS_HOPPER = ("needs Gluon: Triton 3.6 or newer, not interpreted", "needs a GPU of compute capability 9.0")


def pair_case(channels, taps, frames=40, rows=2):
    """x [rows, frames, channels] in fp64, weights, alpha1, bias1, alpha2, bias2."""
    x = torch.randn(rows, frames, channels, dtype=torch.float64)
    weights = torch.randn(2, channels, taps, channels, dtype=torch.float64) / (channels * taps) ** 0.5
    alphas, biases = torch.rand(2, channels).double() + 0.5, torch.randn(2, channels).double()
    return x, weights, alphas[0], biases[0], alphas[1], biases[1]


@pytest.mark.parametrize(("taps", "causal"), [(3, True), (7, False), (11, True)])
def test_three_references_are_the_block(taps, causal):
    """An independent chain: the module of the micro arms, which builds its convolutions as upstream does."""
    block = SnakeBlock(64, taps, causal).double().eval()
    x = torch.randn(2, 64, 50, dtype=torch.float64)
    before = taps - 1 if causal else taps // 2
    y = x.transpose(1, 2)
    run = Run("reference", "three references")
    with torch.no_grad():
        for conv1, conv2, snake1, snake2 in zip(
            block.convs1, block.convs2, block.activations1, block.activations2, strict=True
        ):
            weights = torch.stack([conv1.weight, conv2.weight]).transpose(2, 3).contiguous()
            vectors = snake1.alpha, conv1.bias, snake2.alpha, conv2.bias
            d = conv1.dilation[0]
            y_pair = snake_conv_pair(y, weights, weights, *vectors, None, d, before, before, run=run)
            _, h = conv1d_snake(
                y, weights[0], weights[0], snake1.alpha, conv1.bias, None, snake2.alpha, None, d, before, False, run=run
            )
            y, _ = conv1d_snake(
                h, weights[1], weights[1], None, conv2.bias, y, None, None, 1, before, True, run=run
            )  # fmt: skip
            torch.testing.assert_close(y_pair, y)
        torch.testing.assert_close(y.transpose(1, 2), block(x))


@pytest.mark.parametrize("before", [4, 2, 0])
def test_each_row_is_the_row_alone_whatever_stands_behind(before, run):
    x, *rest = pair_case(64, 5, frames=30, rows=3)
    lengths = [30, 13, 0]
    whole = [snake_conv_pair.reference(x[i : i + 1, :n], *rest[:1], rest[0], *rest[1:], None, 2, before, before)
             for i, n in enumerate(lengths)]  # fmt: skip
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    y = snake_conv_pair(x, rest[0], rest[0], *rest[1:], torch.tensor(lengths), 2, before, before, run=run)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(y[row, :length], whole[row][0])
        assert torch.all(y[row, length:] == 0)


def test_weights_are_packed_in_blocks_of_128_bytes_and_rounded_to_nearest():
    weight = torch.randn(64, 3, 128)
    tiles = packed(weight)
    assert tiles.shape == (3, 4, 64, 32)
    bits = weight.numpy().view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)  # ties away from zero
    for tap, channel, out in ((0, 0, 0), (2, 127, 63), (1, 33, 5)):
        assert tiles[tap, channel // 32, out, channel % 32] == nearest[out, tap, channel]
    assert ((tiles.permute(2, 0, 1, 3).reshape(weight.shape) - weight).abs() <= weight.abs() * 2**-11).all()
    half = weight.bfloat16()
    assert packed(half).shape == (3, 2, 64, 64)
    assert torch.equal(packed_pair(torch.stack([half, half]))[1], packed(half))


def test_a_row_shifted_view_of_a_tile_is_what_the_swizzle_needs():
    """The premise: in the 128-byte swizzle, row r of a block of 128-byte rows is at r times 128 bytes, and its 16-byte
    pieces are permuted by r modulo 8 alone, so that from a block's address on any row is the start of a tile."""
    gluon = pytest.importorskip("triton.experimental.gluon.language")
    layout = gluon.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    found = re.findall(r"Offset: (\d+) -> \(\s*(\d+),\s*(\d+)\)", layout.format_hardware_view([64, 64]))
    assert len(found) == 64 * 64
    for offset, row, column in (map(int, line) for line in found):
        block, piece = column // 32, (column % 32 // 4) ^ (row % 8)
        assert offset == block * 64 * 32 + row * 32 + piece * 4 + column % 4


@pytest.mark.parametrize(("channels", "element_bytes"), [(64, 4), (128, 4), (256, 4), (64, 2), (128, 2), (256, 2)])
@pytest.mark.parametrize("span", [2, 6, 10, 30, 50, 64])
def test_every_configuration_fits_a_multiprocessor(channels, element_bytes, span):
    halo = halo_frames(span)
    n = min(channels, 128)
    m, stages, options = configuration(channels, n, element_bytes, halo)
    programs = 2 if ("maxnreg", 128) in options else 1
    shared = (m + halo) * channels * element_bytes + stages * n * 128
    assert halo >= span and halo % 8 == 0 and stages >= 2
    assert programs * (shared + PROGRAM_BYTES) <= MULTIPROCESSOR_BYTES


def test_without_such_a_gpu_the_reference_runs_and_is_counted(run):
    x, weights, *vectors = (part.float() for part in pair_case(64, 3))
    tiles = packed_pair(weights)
    y = snake_conv_pair(x, weights, tiles, *vectors, None, 1, 2, 2, run=run)
    expected = snake_conv_pair.reference(
        x.double(), weights.double(), tiles, *(v.double() for v in vectors), None, 1, 2, 2
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert reason in NEEDS_HOPPER and TALLIES.of(run.receipt).calls == 0


def test_what_is_outside_the_envelope_is_named(monkeypatch):
    monkeypatch.setattr(_hopper_conv, "hopper", object())
    monkeypatch.setattr(_hopper_conv, "placement_fault", lambda device: None)
    x, weights, *vectors = (part.float() for part in pair_case(64, 3))

    def pair(x=x, weights=weights, vectors=vectors, dilation=1, before=2):
        return snake_conv_pair.unsupported(x, weights, packed_pair(weights), *vectors, None, dilation, before, before)

    assert pair() is None
    assert "taps before" in pair(before=3)
    assert "65 frames" in pair(dilation=40)
    assert "16 bytes" in pair(x=torch.randn(2, 64, 40).transpose(1, 2))
    assert "bias1" in pair(vectors=[vectors[0], vectors[1][:5], *vectors[2:]])
    assert "float64" in pair(x=x.double())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert "allow_tf32" in pair()
    assert pair(x.bfloat16(), weights.bfloat16(), [v.bfloat16() for v in vectors]) is None

    def single(channels, out, residual=None):
        half = torch.randn(1, 20, channels).bfloat16()
        weight = torch.randn(out, 3, channels).bfloat16()
        return conv1d_snake.unsupported(half, weight, packed(weight), None, None, residual, None, None, 1, 1, True)

    assert single(256, 256) is None and single(64, 128) is None
    assert "channels in" in single(512, 512) and "channels in" in single(64, 96)
    assert "residual" in single(64, 64, torch.randn(1, 21, 64).bfloat16())


@pytest.mark.parametrize("shape", [(0, 20, 64), (2, 0, 64)])
def test_zero_sizes_return_at_once(shape, run):
    x = torch.randn(shape)
    weights, vectors = torch.randn(2, 64, 3, 64), [torch.ones(64)] * 4
    assert snake_conv_pair(x, weights, packed_pair(weights), *vectors, None, 1, 2, 2, run=run).shape == shape
