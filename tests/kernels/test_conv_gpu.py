"""The channels-last block's operations where only a GPU can tell: compiles of lengths, graphs, threads, offsets."""

import itertools
import threading

import pytest
import torch
import torch.nn.functional as F

from voxfuse.kernels import moments as moments_file
from voxfuse.kernels._conv_plan import Plan, fastest
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels._phases import PLAIN
from voxfuse.kernels.adain import reference as upstream
from voxfuse.kernels.adain_channels_last import _adain_kernel, adain_channels_last
from voxfuse.kernels.conv1d import STRATEGIES, conv1d, grouped
from voxfuse.kernels.moments import moments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "conv gpu")
EPS = 1e-5


def case(frames, rows=1, channels=64, taps=7, device="cuda", dtype=torch.float32):
    """x, style, alpha, weight, bias."""
    values = (
        torch.randn(rows, frames, channels),
        torch.randn(rows, 2 * channels) * 0.3,
        torch.rand(channels) + 0.3,
        torch.randn(channels, taps, channels) / (taps * channels) ** 0.5,
        torch.randn(channels),
    )
    return [value.to(device, dtype) for value in values]


def half_iteration(tensors, dilation, lengths=None, plan=None):
    """conv(snake(adain(x))) + bias + x, and its moments."""
    x, style, alpha, weight, bias = tensors
    frames = x.shape[1]
    taps = weight.shape[1]
    known = moments(x, lengths, frames, 1, run=RUN)
    plan = plan or fastest(*x.shape, taps, dilation)
    layout = plan.layout(taps, taps // 2, dilation, frames)
    y = adain_channels_last(x, known, style, None, None, alpha, lengths, frames, 1, *layout, EPS, 0.0, run=RUN)
    return conv1d(y, grouped(weight, plan.together), bias, x, lengths, frames, dilation, taps, *plan, run=RUN)


def eager(tensors, dilation):
    x, style, alpha, weight, bias = tensors
    y = upstream(x.transpose(1, 2), style, None, None, alpha, None, EPS, 0.0)
    padding = dilation * (weight.shape[1] - 1) // 2
    y = F.conv1d(y, weight.transpose(1, 2), bias, padding=padding, dilation=dilation)
    return y.transpose(1, 2) + x


def close(result, tensors, dilation):
    """Within 1.25 times eager's error (TF32 by cuDNN's default in both)."""
    oracle = eager([value.double() for value in tensors], dilation)
    error, bound = ((y.double() - oracle).norm() / oracle.norm() for y in (result, eager(tensors, dilation)))
    assert error <= max(1.25 * bound, torch.finfo(result.dtype).eps), f"error {error:.2e}, eager {bound:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dilation", [1, 3, 5])
@pytest.mark.parametrize(("rows", "channels", "frames"), [(2, 64, 2), (3, 128, 1003), (1, 256, 8000), (1, 36, 20_011)])
def test_as_precise_as_eager(rows, channels, frames, dilation, dtype):
    tensors = case(frames, rows, channels, dtype=dtype)
    for axis, together in itertools.product(STRATEGIES, (1, 2, 4)):
        close(half_iteration(tensors, dilation, plan=Plan(axis, together))[0], tensors, dilation)
    assert not TALLIES.of(RUN.receipt).fallbacks


@pytest.mark.parametrize("allowed", [True, False])
def test_the_switch_for_tf32_is_respected(allowed):
    tensors = case(3000, channels=128)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        close(half_iteration(tensors, 3)[0], tensors, 3)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_lengths_do_not_recompile():
    def variants():
        return sum(len(kernel.device_caches[0][0]) for kernel in (moments_file._moments_kernel, _adain_kernel))

    half_iteration(case(1000), 3)
    before = variants()
    for frames in (*range(2, 40), 64, 4096, 9999, 48_001):
        half_iteration(case(frames), 3)
    assert variants() - before <= 2


def test_replays_follow_their_inputs_and_lengths():
    tensors = case(9001)
    lengths = torch.tensor([9001], device="cuda")
    half_iteration(tensors, 5, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = half_iteration(tensors, 5, lengths)
    for length in (9001, 3000, 2, 9000):
        tensors[0].normal_()
        lengths.fill_(length)
        graph.replay()
        close(y[:, :length], [tensors[0][:, :length], *tensors[1:]], 5)
        assert torch.all(y[:, length:] == 0)


def test_threads_on_streams_of_their_own():
    cases = [case(frames) for frames in (1000, 9000, 20_000, 4096)]
    faults = []

    def work(tensors):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                expected, _ = half_iteration(tensors, 3)
                for _ in range(30):
                    if not torch.equal(half_iteration(tensors, 3)[0], expected):
                        faults.append("a result moved")
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            faults.append(repr(error))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(tensors,)) for tensors in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_more_than_two_to_the_31_elements():
    rows, channels, frames = 3, 128, 2**31 // 256
    x = torch.randn(rows, frames, channels, device="cuda", dtype=torch.float16)
    style, alpha = torch.zeros(rows, 2 * channels, device="cuda").half(), torch.ones(channels, device="cuda").half()
    known = moments(x, None, frames, 1, run=RUN)
    y = adain_channels_last(x, known, style, None, None, alpha, None, frames, 1, *PLAIN, EPS, 0.0, run=RUN)
    for part in (slice(0, 1000), slice(frames - 1000, frames)):
        deviation = (x[-1, part].double() - x[-1].double().mean(0)) / x[-1].double().std(0)
        torch.testing.assert_close(y[-1, part].double(), deviation + deviation.sin() ** 2, rtol=2e-3, atol=2e-3)
