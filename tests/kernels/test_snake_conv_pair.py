"""The pair of convolutions without a Hopper GPU: its reference, its envelope, and that it says why it falls back.
What it computes is held against fp64 in test_snake_conv_pair_gpu.py."""

import pytest
import torch
from hopper_cases import pair_case

from voxfuse.kernels import _hopper_conv
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.conv1d_snake import conv1d_snake
from voxfuse.kernels.snake_conv_pair import packed_pair, snake_conv_pair
from voxfuse.microbench.vocoder_arms import SnakeBlock

NEEDS_HOPPER = ("needs Gluon: Triton 3.6 or newer, not interpreted", "needs a GPU of compute capability 9.0")


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


@pytest.mark.parametrize("shape", [(0, 20, 64), (2, 0, 64)])
def test_zero_sizes_return_at_once(shape, run):
    x = torch.randn(shape)
    weights, vectors = torch.randn(2, 64, 3, 64), [torch.ones(64)] * 4
    assert snake_conv_pair(x, weights, packed_pair(weights), *vectors, None, 1, 2, 2, run=run).shape == shape
