"""The pair of convolutions on a Hopper GPU, against fp64 and eager cuDNN."""

import functools

import pytest
import torch
from hopper_cases import TYPES, doubles, on_hopper

from voxfuse.kernels import snake_conv_pair as pair_file
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.snake_conv_pair import packed_pair, snake_conv_pair

pytestmark = on_hopper

RUN = Run("triton", "snake_conv_pair gpu")


def case(rows, frames, channels, taps, dtype=torch.float32):
    """x, weights [2, ...], alphas [2, channels], biases."""
    x = torch.randn(rows, frames, channels)
    weights = torch.randn(2, channels, taps, channels) / (channels * taps) ** 0.5
    alphas, biases = (0.3 * torch.randn(2, channels)).exp(), 0.1 * torch.randn(2, channels)
    return [part.to("cuda", dtype) for part in (x, weights, alphas, biases)]


@pytest.fixture
def assert_pair(same_precision):
    """Runs a pair and holds it against fp64 and eager: as a whole where there are enough frames, and frame by frame."""
    return functools.partial(_assert_pair, same_precision)


def _assert_pair(same_precision, x, weights, alphas, biases, lengths, dilation, before1, before2):
    vectors = alphas[0], biases[0], alphas[1], biases[1]
    arguments = (x, weights, packed_pair(weights), *vectors, lengths, dilation, before1, before2)
    y = snake_conv_pair(*arguments, run=RUN)
    eager, oracle = pair_file.reference(*arguments), pair_file.reference(*doubles(arguments))
    if y.shape[1] > 200:  # of few values the ratio of two errors is noise
        same_precision(y, eager, oracle)
    assert not TALLIES.of(RUN.receipt).fallbacks
    error, scale = (y.double() - oracle).abs().amax(), oracle.abs().amax()
    assert error <= 0.02 * scale, "single frames are wrong: a norm over all hides them"
    return y


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize(("taps", "dilation"), [(3, 1), (3, 5), (7, 3), (11, 1), (11, 5)])
def test_a_pair_is_as_precise_as_eager(taps, dilation, channels, dtype, assert_pair):
    causal, middle = taps - 1, taps // 2
    for frames in (1, 2, 17, 254, 255, 256, 257, 1003):
        assert_pair(*case(2, frames, channels, taps, dtype), None, dilation, causal, causal)
    assert_pair(*case(3, 700, channels, taps, dtype), None, dilation, middle, middle)
    assert_pair(*case(1, 700, channels, taps, dtype), None, dilation, 0, 0)


def test_rows_end_at_their_lengths_whatever_stands_behind(assert_pair):
    x, *rest = case(4, 600, 64, 7)
    lengths = torch.tensor([600, 257, 1, 0], device="cuda")
    expected = assert_pair(x, *rest, lengths, 3, 6, 6)
    for row, length in enumerate(lengths.tolist()):
        x[row, length:] = torch.nan
    weights, alphas, biases = rest
    vectors = alphas[0], biases[0], alphas[1], biases[1]
    y = snake_conv_pair(x, weights, packed_pair(weights), *vectors, lengths, 3, 6, 6, run=RUN)
    assert torch.equal(y, expected)


def test_strided_rows_and_frames(assert_pair):
    wide = torch.randn(2, 520, 192, device="cuda")
    _, *rest = case(1, 1, 64, 3)
    y = assert_pair(wide[:, 3:503, 64:128], *rest, None, 1, 2, 2)
    assert torch.equal(y, assert_pair(wide[:, 3:503, 64:128].contiguous(), *rest, None, 1, 2, 2))


def test_lengths_of_audio_do_not_recompile():
    def call(frames):
        x, weights, alphas, biases = case(1, frames, 64, 3)
        vectors = alphas[0], biases[0], alphas[1], biases[1]
        snake_conv_pair(x, weights, packed_pair(weights), *vectors, None, 1, 2, 2, run=RUN)

    call(1000)
    before = len(pair_file._pair_kernel.device_caches[0][0])
    for frames in (*range(2, 40), 64, 4096, 9999, 48_001):
        call(frames)
    assert len(pair_file._pair_kernel.device_caches[0][0]) - before <= 2


def test_replays_follow_their_inputs_and_lengths(same_precision):
    x, weights, alphas, biases = case(2, 900, 64, 3)
    lengths = torch.tensor([900, 900], device="cuda")
    arguments = (x, weights, packed_pair(weights), alphas[0], biases[0], alphas[1], biases[1], lengths, 1, 2, 2)
    snake_conv_pair(*arguments, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = snake_conv_pair(*arguments, run=RUN)
    for length in (900, 300, 2, 0):
        x.normal_()
        lengths[1] = length
        graph.replay()
        same_precision(y, pair_file.reference(*arguments), pair_file.reference(*doubles(arguments)))


def test_more_than_two_to_the_31_elements():
    rows, channels, frames = 3, 128, 2**31 // 256
    x = torch.randn(rows, frames, channels, device="cuda", dtype=torch.float16)
    _, weights, alphas, biases = case(1, 1, channels, 3, torch.float16)
    vectors = alphas[0], biases[0], alphas[1], biases[1]
    y = snake_conv_pair(x, weights, packed_pair(weights), *vectors, None, 1, 2, 2, run=RUN)
    for part in (slice(0, 1000), slice(frames - 1000, frames)):
        first = max(part.start - 4, 0)
        exact = pair_file.reference(*doubles((x[-1:, first : part.stop], weights, weights, *vectors, None, 1, 2, 2)))
        torch.testing.assert_close(y[-1, part].double(), exact[0, part.start - first :], rtol=5e-3, atol=5e-3)
