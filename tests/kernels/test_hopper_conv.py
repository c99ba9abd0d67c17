"""What the convolutions in Gluon share: packing, the layout of a tile, configurations."""

import re

import numpy as np
import pytest
import torch

from voxfuse.kernels._hopper_conv import (
    MULTIPROCESSOR_BYTES,
    PROGRAM_BYTES,
    configuration,
    halo_frames,
    packed,
)
from voxfuse.kernels.snake_conv_pair import packed_pair


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
