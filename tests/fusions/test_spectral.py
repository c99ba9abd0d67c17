"""Short-time transforms on the real TorchSTFT, kernels by interpreter, against upstream."""

import importlib.util
import sys

import pytest
import torch

from voxfuse.fusions.spectral import magnitude_and_phase, unsupported, waveform
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches._kokoro_import import load_kokoro

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent")


@pytest.fixture
def run(request):
    return Run("interpreter", request.node.nodeid)


@pytest.fixture
def stft():
    load_kokoro()
    return sys.modules["kokoro.istftnet"].TorchSTFT(filter_length=20, hop_length=5, win_length=20)


@torch.no_grad()
def test_there_and_back(stft, run):
    x = torch.randn(2, 60)
    magnitude, phase = magnitude_and_phase(stft, x, run)
    expected = stft.transform(x)
    torch.testing.assert_close(magnitude, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(magnitude * phase.cos(), expected[0] * expected[1].cos(), rtol=1e-5, atol=1e-6)
    audio = waveform(stft, *expected, run)
    torch.testing.assert_close(audio, stft.inverse(*expected), rtol=1e-5, atol=3e-6)
    assert TALLIES.of(run.receipt).calls == 2 and not TALLIES.of(run.receipt).fallbacks


@torch.no_grad()
def test_another_window_reaches_the_kernel(stft, run):
    x = torch.randn(1, 30)
    magnitude_and_phase(stft, x, run)
    stft.window = torch.hamming_window(20)
    torch.testing.assert_close(magnitude_and_phase(stft, x, run)[0], stft.transform(x)[0], rtol=1e-5, atol=1e-6)


def test_a_window_that_upstream_refuses_is_left_to_it(stft):
    assert unsupported(stft) is None
    stft.window = torch.zeros(20)
    assert "torch.istft refuses the window" in unsupported(stft)
    stft.win_length = 10
    assert "as long as n_fft, got 10 and 20" in unsupported(stft)


def waits(call):
    """Profiled operations that give the host a tensor's value: on a GPU each waits for it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()} & {"aten::equal", "aten::item", "aten::_local_scalar_dense"}


@torch.no_grad()
def test_the_inverse_never_waits_for_the_gpu(stft, run):
    """vllm-omni #5869: torch.istft reads the window's envelope on the host, so that no graph can be captured."""
    spectrum = torch.rand(1, 11, 6), torch.randn(1, 11, 6)
    assert waits(lambda: stft.inverse(*spectrum)), "torch.istft no longer waits: this fusion's premise changed"
    assert unsupported(stft) is None  # asks torch.istft once a window
    waveform(stft, *spectrum, run)
    assert not waits(lambda: (unsupported(stft), waveform(stft, *spectrum, run)))
