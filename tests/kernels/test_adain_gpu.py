"""AdaIN where only a GPU can tell: compiles as lengths vary, graphs, streams, threads, devices, host cost."""

import threading
import time

import pytest
import torch

from voxfuse.kernels import _launch
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.adain import RESIDENT_FRAMES, STREAM_FRAMES, adain_act, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

EPS, SLOPE = 1e-5, 0.2
HOST_US = 25.0


def case(frames, rows=1, channels=64, device="cuda"):
    x = torch.randn(rows, channels, frames, device=device)
    style, alpha = torch.randn(rows, 2 * channels, device=device) * 0.3, torch.rand(channels, device=device) + 0.3
    return x, style, torch.ones(channels, device=device), torch.zeros(channels, device=device), alpha


def fused(tensors, lengths=None):
    return adain_act(*tensors, lengths, EPS, SLOPE, run=Run("triton", "gpu"))


def close(result, tensors):
    torch.testing.assert_close(result, reference(*tensors, None, EPS, SLOPE), rtol=1e-4, atol=1e-4)


def test_lengths_do_not_recompile():
    before = len(_launch._compiled)
    for frames in range(STREAM_FRAMES + 1, STREAM_FRAMES + 65):
        fused(case(frames))
    assert len(_launch._compiled) - before <= 2


def test_an_unaligned_view():
    x, *rest = case(1001)
    x = torch.randn(x.numel() + 1, device="cuda")[1:].view(x.shape)
    assert x.data_ptr() % 16
    close(fused([x, *rest]), [x, *rest])


@pytest.mark.parametrize("frames", [RESIDENT_FRAMES, 48_001])
def test_replays_follow_their_inputs_and_lengths(frames):
    x, *rest = case(frames)
    lengths = torch.tensor([frames], device="cuda")
    fused([x, *rest], lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused([x, *rest], lengths)
    for length in (frames, frames // 3, frames - 1):
        x.normal_()
        lengths.fill_(length)
        graph.replay()
        close(y[:, :, :length], [x[:, :, :length], *rest])
        assert torch.all(y[:, :, length:] == 0)


def test_threads_on_streams_of_their_own():
    cases = [case(frames) for frames in (1000, 9000, 20_000, 4096)]
    faults = []

    def work(tensors):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                expected = fused(tensors)
                for _ in range(50):
                    if not torch.equal(fused(tensors), expected):
                        faults.append("a result moved")
                torch.cuda.current_stream().synchronize()
                close(expected, tensors)
        except Exception as error:
            faults.append(repr(error))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(tensors,)) for tensors in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_tensor_on_another_device_than_the_current_one():
    tensors = case(9000, device="cuda:1")
    close(fused(tensors), tensors)
    assert torch.cuda.current_device() == 0


def test_more_than_two_to_the_31_elements():
    channels, frames = 128, 2**31 // 128 + 4097
    x = torch.randn(1, channels, frames, device="cuda", dtype=torch.float16)
    style, alpha = torch.randn(1, 2 * channels, device="cuda") * 0.3, torch.rand(channels, device="cuda") + 0.3
    y = fused([x, style, None, None, alpha])
    one = slice(channels - 1, channels)
    last = style[:, [channels - 1, 2 * channels - 1]]
    expected = reference(x[:, one].double(), last.double(), None, None, alpha[one].double(), None, EPS, SLOPE)
    torch.testing.assert_close(y[:, one].double(), expected, rtol=1e-3, atol=1e-3)


def host_us(call):
    """Least host time of a call in µs over five rounds, without waiting for the GPU."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(400):
            call()
        best = min(best, (time.perf_counter() - start) / 400 * 1e6)
    return best


@torch.no_grad()
def test_host_cost_of_a_call():
    """25 µs on a host that launches an eager kernel in 5 µs; on a slower one (a virtual machine) in proportion."""
    tensors = case(100)
    limit = HOST_US * max(1.0, host_us(lambda: tensors[0] + 1.0) / 5.0)
    cost = host_us(lambda: fused(tensors))
    assert cost <= limit, f"{cost:.1f} µs a call, at most {limit:.1f} allowed"
    assert TALLIES.of("gpu").fallbacks == {}
