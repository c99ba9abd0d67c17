"""The AdaIN residual blocks on the real Kokoro classes, kernel by interpreter, against upstream in fp64."""

import copy
import importlib.util

import pytest
import torch

from voxfuse.fusions.adain_resblock import (
    adain_leaky_relu_residual,
    adain_snake_resblock,
    padded_styles,
    unsupported,
)
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches._kokoro_import import load_kokoro

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent")

CHANNELS, STYLE, FRAMES = 8, 16, 40


@pytest.fixture
def run(request):
    return Run("interpreter", request.node.nodeid)


@pytest.fixture
def istftnet():
    load_kokoro()
    import kokoro.istftnet

    return kokoro.istftnet


def relative_rms(value, oracle):
    return ((value.double() - oracle).norm() / oracle.norm()).item()


def trained(module):
    """Random parameters everywhere: upstream initialises alpha to 1 and the instance norm to identity."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.2, 1.0) if parameter.dim() == 3 and parameter.shape[0] == 1 else parameter.normal_(
                0, 0.2
            )
    return module.eval()


def inputs():
    return torch.randn(2, CHANNELS, FRAMES), torch.randn(2, STYLE)


@torch.no_grad()
def test_snake_block(istftnet, run):
    block = trained(istftnet.AdaINResBlock1(CHANNELS, 3, (1, 3, 5), STYLE))
    x, s = inputs()
    oracle = copy.deepcopy(block).double()(x.double(), s.double())
    fused = adain_snake_resblock(block, x, s, run)
    assert relative_rms(fused, oracle) <= max(1.25 * relative_rms(block(x, s), oracle), 2**-23)
    assert TALLIES.of(run.receipt).calls == 6 and not TALLIES.of(run.receipt).fallbacks


@torch.no_grad()
@pytest.mark.parametrize(("dim_out", "upsample"), [(CHANNELS, "none"), (6, "none"), (6, True)])
def test_leaky_relu_block(istftnet, run, dim_out, upsample):
    block = trained(istftnet.AdainResBlk1d(CHANNELS, dim_out, STYLE, upsample=upsample, dropout_p=0.2))
    x, s = inputs()
    oracle = copy.deepcopy(block).double()._residual(x.double(), s.double())
    fused = adain_leaky_relu_residual(block, x, s, run)
    assert relative_rms(fused, oracle) <= max(1.25 * relative_rms(block._residual(x, s), oracle), 2**-23)
    assert TALLIES.of(run.receipt).calls == 2 and not TALLIES.of(run.receipt).fallbacks


@torch.no_grad()
def test_styles_are_each_norms_own_projection(istftnet):
    block = trained(istftnet.AdaINResBlock1(CHANNELS, 3, (1, 3, 5), STYLE))
    norms = [*block.adain1, *block.adain2]
    _, s = inputs()
    widths = [(norm, CHANNELS) for norm in norms]
    for projected, norm in zip(padded_styles(block, widths, s), norms, strict=True):
        torch.testing.assert_close(projected, norm.fc(s))


@torch.no_grad()
def test_new_weights_reach_the_packed_styles(istftnet, run):
    block = trained(istftnet.AdaINResBlock1(CHANNELS, 3, (1, 3, 5), STYLE))
    x, s = inputs()
    adain_snake_resblock(block, x, s, run)
    block.load_state_dict(trained(istftnet.AdaINResBlock1(CHANNELS, 3, (1, 3, 5), STYLE)).state_dict())
    torch.testing.assert_close(adain_snake_resblock(block, x, s, run), block(x, s), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_norm_that_is_not_upstreams_is_refused_with_its_kind(istftnet):
    adain = istftnet.AdaIN1d(STYLE, CHANNELS)
    assert unsupported(adain, [adain]) is None
    adain.fc = torch.nn.Sequential(adain.fc)
    assert "Sequential, expected Linear" in unsupported(adain, [adain])
    adain = istftnet.AdaIN1d(STYLE, CHANNELS)
    adain.norm = torch.nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=True)
    assert "without running statistics" in unsupported(adain, [adain])


def test_gradients_are_left_to_upstream(istftnet):
    adain = istftnet.AdaIN1d(STYLE, CHANNELS)
    assert "gradient" in unsupported(adain, [adain])
    assert unsupported(adain.requires_grad_(False), [adain]) is None
    assert "gradient" in unsupported(adain, [adain], torch.ones(1, requires_grad=True))
