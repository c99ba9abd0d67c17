"""The short-time transforms and the source where only a GPU can tell: graphs, recompiles, signs of cuFFT, host cost."""

import time

import pytest
import torch

from voxfuse.kernels import _launch, held_source, istft, sine_source, stepped_source, stft
from voxfuse.kernels._op import TALLIES, Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "spectral gpu")
HOP, SCALE = 5, 300
SETTINGS = (SCALE, 24_000.0, 0.1, 0.003, 10.0)
HOST_US = 25.0


def window():
    return torch.hann_window(20).cuda()


def stft_case(frames, rows=2):
    samples = (frames - 1) * HOP
    x = 0.1 * torch.sin(0.07 * torch.arange(samples, device="cuda")) + 0.01 * torch.randn(rows, samples, device="cuda")
    return stft.stft_polar, (x, window()), (HOP,), frames


def parts_case(frames, rows=2):
    _, tensors, _, _ = stft_case(frames, rows)
    return stft.stft_complex, tensors, (HOP, 14, frames + 30, 24), frames


def istft_case(frames, rows=2):
    x = torch.randn(rows, 22, frames, device="cuda")
    return istft.istft_polar, (x[:, :11], x[:, 11:], window()), (HOP, "exp_sin"), frames


def source_case(frames, rows=2):
    noise = torch.randn(rows, 9, frames * SCALE, device="cuda").transpose(1, 2)
    f0 = 100 + 50 * torch.rand(rows, frames, device="cuda")
    weight, bias = torch.randn(1, 9, device="cuda"), torch.zeros(1, device="cuda")
    return sine_source.sine_source, (f0, torch.rand(rows, 9, device="cuda"), noise, weight, bias), SETTINGS, frames


def stepped_case(frames, rows=2):
    _, (f0, initial, *rest), _, _ = source_case(frames, rows)
    return stepped_source.stepped_source, (f0, initial - 0.5, *rest), SETTINGS, frames


def held_case(frames, rows=2):
    _, (f0, _, noise, weight, bias), _, _ = source_case(frames, rows)
    sines = torch.sin(100 * torch.rand(rows, 9, frames, device="cuda")).transpose(1, 2)
    return held_source.held_source, (sines, f0, noise, weight, bias), (SCALE, *SETTINGS[2:]), frames


CASES = {
    "stft": stft_case,
    "parts": parts_case,
    "istft": istft_case,
    "sine_source": source_case,
    "stepped_source": stepped_case,
    "held_source": held_case,
}


def wide(tensors):
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("name", CASES)
def test_lengths_do_not_recompile(name):
    before = len(_launch._compiled)
    homes = {"stft": stft, "parts": stft, "istft": istft, "held_source": held_source}
    kernels = getattr(
        homes.get(name, sine_source), f"_{name.replace('stepped', 'sine').replace('parts', 'stft')}_kernel"
    )
    for frames in range(101, 150):
        op, tensors, rest, _ = CASES[name](frames)
        op(*tensors, None, *rest, run=RUN)
    compiled = sum(len(cache[0]) for cache in kernels.device_caches.values())
    assert compiled <= 8 and len(_launch._compiled) - before <= 16


@pytest.mark.parametrize("name", CASES)
def test_replays_follow_their_inputs_and_lengths(name, same_precision):
    op, tensors, rest, frames = CASES[name](700)
    unit = HOP if name in ("stft", "parts") else 1  # lengths of the transform are in samples
    lengths = torch.tensor([frames * unit, frames * unit], device="cuda")
    op(*tensors, lengths, *rest, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(*tensors, lengths, *rest, run=RUN)
    for valid in ((700, 30), (301, 699), (64, 64)):
        tensors[0].mul_(0.9)
        lengths.copy_(torch.tensor([min(v * unit, (frames - 1) * unit) for v in valid]))
        graph.replay()
        eager = op.reference(*tensors, lengths, *rest)
        oracle = op.reference(*wide(tensors), lengths, *rest)
        same_precision(y, eager, oracle)
        assert torch.all((y == 0) | (oracle != 0) | (oracle.abs() < 1e-7))


def test_cufft_gives_real_bins_a_positive_zero():
    """What the phase of DC and Nyquist rests on: angle(-1, +0) is +pi, angle(-1, -0) is -pi."""
    op, (x, w), _, _ = stft_case(400)
    spectrum = torch.stft(x, 20, HOP, 20, window=w, return_complex=True)
    for bin_ in (0, 10):
        imaginary = spectrum[:, bin_].imag
        assert torch.all(imaginary == 0) and not torch.signbit(imaginary).any()
    assert torch.equal(op(x, w, None, HOP, run=RUN)[:, [11, 21]], torch.angle(spectrum)[:, [0, 10]])


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
@pytest.mark.parametrize("name", CASES)
def test_host_cost_of_a_call(name):
    """25 µs on a host that launches an eager kernel in 5 µs; on a slower one (a virtual machine) in proportion."""
    op, tensors, rest, _ = CASES[name](40, rows=1)
    limit = HOST_US * max(1.0, host_us(lambda: tensors[0] + 1.0) / 5.0)
    cost = host_us(lambda: op(*tensors, None, *rest, run=RUN))
    assert cost <= limit, f"{cost:.1f} µs a call, at most {limit:.1f} allowed"
    assert TALLIES.of(RUN.receipt).fallbacks == {}
