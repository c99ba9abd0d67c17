"""The channels-last AdaIN block on the real Kokoro class, kernels by interpreter, against upstream in fp64."""

import copy
import importlib.util

import pytest
import torch

from voxfuse.fusions.adain_conv_block import (
    adain_leaky_relu_block,
    adain_snake_block,
    run_block,
    unsupported,
)
from voxfuse.fusions.adain_resblock import padded_styles, snake_norms
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.moments import moments, residual_moments
from voxfuse.patches._kokoro_import import load_kokoro

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent")

CHANNELS, STYLE = 8, 16
CALLS = 13  # the moments of the input, then six times AdaIN and convolution


@pytest.fixture
def run(request):
    return Run("interpreter", request.node.nodeid)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def make(taps=3):
    """A block with random parameters everywhere: upstream initialises alpha to 1 and the instance norm to identity."""
    load_kokoro()
    from kokoro.istftnet import AdaINResBlock1

    block = AdaINResBlock1(CHANNELS, taps, (1, 3, 5), STYLE)
    for name, parameter in block.named_parameters():
        parameter.uniform_(0.3, 1.5) if name.startswith("alpha") else parameter.normal_(0, 0.4)
    return block.eval()


def inputs(frames, rows=2):
    return torch.randn(rows, CHANNELS, frames) * 2 + 1, torch.randn(rows, STYLE)


def in_fp64(block, x, s):
    return copy.deepcopy(block).double()(x.double(), s.double())


def check(value, block, x, s):
    """At most 1.25 times upstream's error, or one unit in the last place."""
    close(value, block(x, s), in_fp64(block, x, s))


def close(value, eager, oracle):
    error, upstream = (((other.double() - oracle).norm() / oracle.norm()).item() for other in (value, eager))
    assert error <= max(1.25 * upstream, 2**-23), f"error {error:.2e}, upstream {upstream:.2e}"


@pytest.mark.parametrize("taps", [3, 7, 11])
def test_as_precise_as_upstream_at_any_length(taps, run, poisoned_empty):
    """Errors pooled over the lengths, as a short one's is luck by what order its products are added in."""
    block, pooled = make(taps), []
    lengths = [*range(2, 21), 61, 130]
    for frames in lengths:
        x, s = inputs(frames, rows=1 if frames < 60 else 2)
        assert unsupported(block, x, s) is None
        y = run_block(block, x, s, run)
        assert y.shape == x.shape
        pooled.append([value.double().flatten() for value in (y, block(x, s), in_fp64(block, x, s))])
        assert (pooled[-1][0] - pooled[-1][2]).norm() <= 2**-21 * pooled[-1][2].norm()
    close(*(torch.cat(values) for values in zip(*pooled, strict=True)))
    assert TALLIES.of(run.receipt).calls == CALLS * len(lengths) and not TALLIES.of(run.receipt).fallbacks


def test_each_row_equals_itself_alone_whatever_stands_behind(run, poisoned_empty):
    block, lengths = make(7), [60, 59, 31, 4, 2]
    x, s = inputs(60, rows=len(lengths))
    for row, length in enumerate(lengths):
        x[row, :, length:] = torch.nan
    on_device = torch.tensor(lengths)
    y, known = residual_moments(x.transpose(1, 2), None, None, on_device, 60, 1, run=run)
    projected = iter(padded_styles(block, [(norm, CHANNELS) for norm in snake_norms(block)], s))
    y = adain_snake_block(block, y, known, projected, on_device, run).transpose(1, 2)
    for row, length in enumerate(lengths):
        assert torch.all(y[row, :, length:] == 0)
        check(y[row : row + 1, :, :length], block, x[row : row + 1, :, :length], s[row : row + 1])


@pytest.mark.parametrize("layout", ["channels last", "a slice of a wider tensor", "one row expanded"])
def test_any_strides_and_the_input_is_left_alone(layout, run):
    block = make()
    x, s = inputs(33)
    if layout == "channels last":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "a slice of a wider tensor":
        x = torch.randn(2, CHANNELS + 3, 40)[:, 2:-1, 4:37]
    else:
        x = x[:1].expand(2, -1, -1)
    before = x.clone()
    check(run_block(block, x, s, run), block, x, s)
    assert torch.equal(x, before)


def test_the_result_is_fresh_and_takes_what_upstream_does_with_it(run):
    first, second = make(), make(7)
    x, s = inputs(30)
    xs = run_block(first, x, s, run)
    assert xs.data_ptr() != x.data_ptr()
    xs += run_block(second, x, s, run)
    y = torch.nn.functional.leaky_relu(xs / 2)
    expected = torch.nn.functional.leaky_relu((first(x, s) + second(x, s)) / 2)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    for module in (torch.nn.Conv1d(CHANNELS, 4, 7, padding=3), torch.nn.ConvTranspose1d(CHANNELS, 4, 12, 6, padding=3)):
        torch.testing.assert_close(module(y), module(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("upsample", ["none", True])
@pytest.mark.parametrize("channels", [(6, 6), (6, 4)])
def test_leaky_relu_blocks_with_spare_channels_and_rows_of_their_own(channels, upsample, run, poisoned_empty):
    make()
    from kokoro.istftnet import AdainResBlk1d

    block = AdainResBlk1d(*channels, STYLE, upsample=upsample).eval()
    for parameter in block.parameters():
        parameter.normal_(0, 0.4)
    lengths, width = [20, 11, 2], 8
    x, s = torch.randn(3, channels[0], 20), torch.randn(3, STYLE)
    spared = torch.nn.functional.pad(x.transpose(1, 2), (0, width - channels[0])).contiguous()
    for row, length in enumerate(lengths):
        spared[row, length:] = torch.nan
    on_device = torch.tensor(lengths)
    norms = [(block.norm1, width), (block.norm2, channels[1])]
    projected = iter(padded_styles(block, norms, s))
    known = moments(spared, on_device, 20, 1, run=run)
    y = adain_leaky_relu_block(block, spared, known, projected, on_device, run).transpose(1, 2)
    scale = 1 if upsample == "none" else 2
    assert y.shape == (3, channels[1], 20 * scale) and not TALLIES.of(run.receipt).fallbacks
    for row, length in enumerate(lengths):
        assert torch.all(y[row, :, length * scale :] == 0)
        check(y[row : row + 1, :, : length * scale], block, x[row : row + 1, :, :length], s[row : row + 1])


def test_new_weights_reach_the_packs_and_the_state_stays_upstreams(run):
    block, other = make(), make()
    x, s = inputs(20)
    keys = list(block.state_dict())
    run_block(block, x, s, run)
    assert list(block.state_dict()) == keys
    block.load_state_dict(other.state_dict())
    check(run_block(block, x, s, run), other, x, s)
    block.convs1[1].weight_g.mul_(2)
    check(run_block(block, x, s, run), block, x, s)


def test_without_weight_norm_and_without_bias(run):
    block = make()
    for conv in (*block.convs1, *block.convs2):
        torch.nn.utils.remove_weight_norm(conv)
    block.convs1[0].bias = block.convs2[2].bias = None
    x, s = inputs(20)
    assert unsupported(block, x, s) is None
    check(run_block(block, x, s, run), block, x, s)


def test_a_large_bias_before_an_instance_norm_costs_nothing(run):
    block = make()
    for conv in block.convs1:
        conv.bias.mul_(1e4)
    x, s = inputs(40)
    check(run_block(block, x, s, run), block, x, s)


def test_fp16(run):
    """bf16 is tested on the GPU alone: the interpreter truncates to it."""
    block = make().half()
    x, s = (tensor.half() for tensor in inputs(40))
    y = run_block(block, x, s, run)
    oracle, eager = in_fp64(block, x, s), block(x, s)
    assert y.dtype == torch.float16 and not TALLIES.of(run.receipt).fallbacks
    error, upstream = (((other.double() - oracle).norm() / oracle.norm()).item() for other in (y, eager))
    assert error <= max(1.25 * upstream, 2**-10)


def test_what_cannot_be_fused_is_refused_with_the_reason():
    block = make()
    x, s = inputs(20)
    assert "float64" in unsupported(block, x.double(), s)
    assert "float16" in unsupported(block, x, s.half())
    assert "8 channels of the convolutions, got 3" in unsupported(block, x[:, :3], s)
    assert "at least two frames" in unsupported(block, x[:, :, :1], s)
    with torch.autocast("cpu"):
        assert "autocast" in unsupported(block, x, s)
    block.convs2[1].register_forward_hook(lambda *_: None)
    assert "hooks" in unsupported(block, x, s)
    with torch.enable_grad():
        assert "gradient" in unsupported(block, x, s)
