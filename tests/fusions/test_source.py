"""The harmonic source on the real SourceModuleHnNSF: same random numbers, same values, same generator state."""

import importlib.util
import sys
from unittest import mock

import pytest
import torch

from voxfuse.fusions.source import harmonic_source, unsupported
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches._kokoro_import import load_kokoro

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent")

SCALE = 40


@pytest.fixture
def run(request):
    return Run("interpreter", request.node.nodeid)


@pytest.fixture
def source():
    load_kokoro()
    module = sys.modules["kokoro.istftnet"].SourceModuleHnNSF(24_000, SCALE, harmonic_num=8, voiced_threshod=10)
    return module.eval()


def f0(rows=2, frames=12):
    """As the generator gives it: held for SCALE samples, [rows, samples, 1], with unvoiced frames."""
    values = 80 + 200 * torch.rand(rows, frames)
    values[:, 2::5] = 0
    return torch.nn.Upsample(scale_factor=SCALE)(values[:, None]).transpose(1, 2)


def seeded(call):
    torch.manual_seed(11)
    with torch.no_grad():
        return call(), torch.get_rng_state()


def test_same_random_numbers_in_the_same_order(source, run):
    x = f0()
    (expected, noise, voiced), state = seeded(lambda: source(x))
    found, state_after = seeded(lambda: harmonic_source(source, x, run))
    assert torch.equal(state_after, state), "another number of random numbers was drawn"
    assert torch.equal(found[1], noise) and torch.equal(found[2], voiced)
    assert found[0].shape == expected.shape
    assert ((found[0] - expected).norm() / expected.norm()).item() < 1e-3  # upstream's fp32 phase
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_the_reference_is_upstream_to_the_bit(source, run):
    x = f0()
    (expected, *_), _ = seeded(lambda: source(x))
    (found, *_), _ = seeded(lambda: harmonic_source(source, x, run._replace(backend="reference")))
    assert torch.equal(found, expected)


def test_upstreams_random_phases_change_nothing(source):
    x = f0()
    draw = torch.rand
    (expected, *_), _ = seeded(lambda: source(x))
    with mock.patch.object(torch, "rand", lambda *args, **kwargs: draw(*args, **kwargs) + 7.3):
        (found, *_), _ = seeded(lambda: source(x))
    assert torch.equal(found, expected)


def test_an_f0_that_is_not_held_is_followed_too(source, run):
    x = 80 + 200 * torch.rand(1, 6 * SCALE, 1)
    (expected, *_), _ = seeded(lambda: source(x))
    (found, *_), _ = seeded(lambda: harmonic_source(source, x, run))
    assert ((found - expected).norm() / expected.norm()).item() < 1e-3


def test_what_is_not_kokoros_is_refused_with_its_kind(source):
    x = f0()
    assert unsupported(source, x) is None
    assert "torch.float64" in unsupported(source, x.double())
    source.l_sin_gen.flag_for_pulse = True
    assert "pulse train" in unsupported(source, x)
    source.l_sin_gen.flag_for_pulse = False
    source.l_linear = torch.nn.Linear(9, 1, bias=False)
    assert "expected Linear with bias" in unsupported(source, x)
