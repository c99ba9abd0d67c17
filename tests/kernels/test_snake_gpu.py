"""Snake with bias and residual where only a GPU can tell: compiles of lengths, replays, offsets, the real sine."""

import pytest
import torch

from voxfuse.kernels import snake as snake_file
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels._phases import PLAIN, from_phases, to_phases
from voxfuse.kernels.snake import snake

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "snake gpu")


def case(frames, rows=1, channels=64, dtype=torch.float32):
    """x, bias, residual, alpha."""
    values = (
        torch.randn(rows, frames, channels) * 3,
        torch.randn(channels),
        torch.randn(rows, frames, channels),
        torch.exp(torch.randn(channels)),
    )
    return [value.to("cuda", dtype) for value in values]


def chain(x, bias, residual, alpha):
    raw = x + bias + residual
    return raw, raw + (1.0 / (alpha + 0.000000001)) * torch.pow(torch.sin(raw * alpha), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "channels", "frames"), [(16, 64, 60_001), (3, 256, 4000), (33, 128, 1003), (1, 36, 2)]
)
def test_as_precise_as_eager(rows, channels, frames, dtype):
    tensors = case(frames, rows, channels, dtype)
    x, *rest = tensors
    raw, y = snake(to_phases(x, 3), *rest, None, frames, 3, 5, 4, 7, True, run=RUN)
    eager, oracle = chain(*tensors), chain(*[value.double() for value in tensors])
    if dtype == torch.float32:
        assert torch.equal(raw, eager[0])
    for result, other, exact in zip((raw, from_phases(y, frames, 5, 4)), eager, oracle, strict=True):
        error, bound = ((value.double() - exact).norm() / exact.norm() for value in (result, other))
        assert error <= max(1.25 * bound, torch.finfo(dtype).eps)
    assert not TALLIES.of(RUN.receipt).fallbacks


def test_lengths_do_not_recompile():
    def call(frames):
        x, *rest = case(frames)
        snake(to_phases(x, 3), *rest, None, frames, 3, *PLAIN, True, run=RUN)

    call(1000)
    before = len(snake_file._snake_kernel.device_caches[0][0])
    for frames in (*range(2, 40), 64, 4096, 9999, 48_001):
        call(frames)
    assert len(snake_file._snake_kernel.device_caches[0][0]) - before <= 2


def test_replays_follow_their_inputs_and_lengths():
    tensors = case(9000, rows=2)
    lengths = torch.tensor([9000, 9000], device="cuda")
    snake(*tensors, lengths, 9000, 1, *PLAIN, True, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        raw, y = snake(*tensors, lengths, 9000, 1, *PLAIN, True, run=RUN)
    for length in (9000, 3000, 2, 8999, 0):
        tensors[0].normal_()
        lengths[1] = length
        graph.replay()
        expected = chain(*tensors)
        for result, chained in zip((raw, y), expected, strict=True):
            torch.testing.assert_close(result[0], chained[0], rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(result[1, :length], chained[1, :length], rtol=2e-6, atol=2e-6)
            assert torch.all(result[1, length:] == 0)


def test_more_than_two_to_the_31_elements():
    rows, channels, frames = 3, 128, 2**31 // 256
    x = torch.randn(rows, frames, channels, device="cuda", dtype=torch.float16)
    alpha = torch.ones(channels, device="cuda", dtype=torch.float16)
    _, y = snake(x, None, None, alpha, None, frames, 1, *PLAIN, False, run=RUN)
    for part in (slice(0, 1000), slice(frames - 1000, frames)):
        exact = x[-1, part].double() + x[-1, part].double().sin().square()
        torch.testing.assert_close(y[-1, part].double(), exact, rtol=2e-3, atol=2e-3)
