"""Pairs of convolutions of a Snake block as one kernel: where, what of, and that the block and HiFT stay upstream's.

There is no Hopper GPU here: ``forced`` lets the reference backend take the way that the table and the shapes choose on
one, on which test_snake_pairs_gpu.py runs the kernel.
"""

import copy

import hift_classes
import pytest
import torch

from voxfuse.fusions import snake_conv_block
from voxfuse.fusions.hift import decode, samples_per_frame
from voxfuse.fusions.snake_conv_block import run_block, runs_pairs, snake_block
from voxfuse.kernels import _hopper_conv
from voxfuse.kernels._op import TALLIES, Run

CLOSE = 1e-5  # relative RMS: fp32 roundings amplified by exp; a tail that leaks is above 1e-3
CHAIN_CALLS, PAIR_CALLS = 7, 3  # of a block with three pairs

pytestmark = pytest.mark.filterwarnings("ignore:.*window was not provided.*")


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return request.param


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(snake_conv_block, "runs_pairs", lambda x, run: True)


@pytest.fixture
def counted(request):
    """A run on the reference backend and its tally."""
    run = Run("reference", request.node.nodeid)
    return run, TALLIES.of(run.receipt)


def block_of(stack, channels, taps, dilations=(1, 3, 5)):
    """Upstream's block; initial alphas of one and small biases would hide a mistake."""
    causal = {"causal": True} if stack == "cosyvoice3" else {}
    block = hift_classes.upstream(stack).ResBlock(channels, taps, list(dilations), **causal).eval()
    for name, parameter in block.named_parameters():
        if name.endswith("alpha"):
            parameter.uniform_(0.3, 3)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.2)
    return block


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(
    ("channels", "taps", "calls"),
    [(64, 3, 3), (64, 7, 3), (64, 11, 3), (128, 3, 3), (128, 7, 7), (128, 11, 7), (256, 3, 7), (32, 3, 7)],
)
def test_blocks_are_upstreams_whichever_way_they_run(stack, channels, taps, calls, forced, counted):
    """Rows of mixed lengths with NaN behind them, each as alone in fp64; ``calls`` say which way was taken."""
    block, (run, tally) = block_of(stack, channels, taps), counted
    double = copy.deepcopy(block).double()
    lengths = (23, 1, 9, 0, 22)
    x = torch.randn(len(lengths), 23, channels)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    y = snake_block(block, x, torch.tensor(lengths), run)
    assert y.is_contiguous() and (tally.calls, dict(tally.fallbacks)) == (calls, {})
    for row, length in enumerate(lengths):
        assert torch.all(y[row, length:] == 0)
        if length:
            alone = double(x[row : row + 1, :length].transpose(1, 2).double()).transpose(1, 2)
            assert relative_rms(y[row : row + 1, :length], alone) < CLOSE


def test_a_pair_that_is_too_wide_runs_as_a_chain_between_others(stack, forced, counted):
    block, (run, tally) = block_of(stack, 64, 11, (1, 7, 3)), counted
    x = torch.randn(2, 80, 64)
    y = snake_block(block, x, None, run)
    assert (tally.calls, dict(tally.fallbacks)) == (1 + 3 + 1, {})
    assert relative_rms(y.transpose(1, 2), block.double()(x.transpose(1, 2).double())) < CLOSE


@pytest.mark.parametrize("frames", [1, 17])
def test_channels_first_cost_one_copy(stack, frames, forced, counted):
    block, (run, tally) = block_of(stack, 64, 3), counted
    x = torch.randn(2, 64, frames)
    y = run_block(block, x, run)
    assert tally.calls == 1 + PAIR_CALLS
    assert relative_rms(y, block(x)) < CLOSE
    assert relative_rms(run_block(block, y, run), block(y)) < CLOSE
    assert tally.calls == 1 + 2 * PAIR_CALLS, "what a block gives is read as it lies"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_less_than_eager(stack, dtype, forced, counted):
    block, x = block_of(stack, 64, 3).to(dtype), torch.randn(2, 64, 200).to(dtype)
    expected = copy.deepcopy(block).double()(x.double())
    fused = run_block(block, x, counted[0])
    assert fused.dtype == dtype
    assert relative_rms(fused, expected) <= 1.25 * relative_rms(block(x), expected)


def test_new_weights_are_heard(stack, forced, counted):
    block, x = block_of(stack, 64, 3), torch.randn(1, 64, 30)
    before = run_block(block, x, counted[0])
    for conv in (block.convs1[1], block.convs2[2]):
        conv.parametrizations.weight.original0.mul_(1.5)
        after = run_block(block, x, counted[0])
        assert relative_rms(after, block(x)) < CLOSE and relative_rms(before, after) > 1e-3
        before = after
    block.convs2[0] = copy.deepcopy(block.convs2[1])
    assert relative_rms(run_block(block, x, counted[0]), block(x)) < CLOSE


def test_a_whole_decoder_of_both_ways(stack, forced, counted):
    """The first stage has 64 channels, the second 32."""
    hift, (run, tally) = hift_classes.generator(stack, base_channels=128), counted
    lengths = (7, 1, 4)
    per_frame = samples_per_frame(hift)
    mel = torch.randn(3, hift_classes.BINS, 7)
    source = 0.1 * torch.sin(torch.arange(7 * per_frame) * 0.04) + 0.02 * torch.randn(3, 1, 7 * per_frame)
    audio = decode(hift, mel, source, torch.tensor(lengths), run)
    assert tally.calls == 4 + 4 * PAIR_CALLS + 4 * CHAIN_CALLS + 2 * 2 + 3 and not tally.fallbacks
    for row, length in enumerate(lengths):
        alone = hift.decode(mel[row : row + 1, :, :length], source[row : row + 1, :, : length * per_frame])
        assert relative_rms(audio[row : row + 1, : length * per_frame], alone) < CLOSE
        assert torch.all(audio[row, length * per_frame :] == 0)


@pytest.mark.parametrize("backend", ["reference", "interpreter", "triton"])
def test_elsewhere_the_chain_is_what_is_meant(backend):
    assert not runs_pairs(torch.randn(1, 8, 64), Run(backend, "elsewhere"))


def test_a_hopper_gpu_and_tf32_decide(monkeypatch):
    device, single, half = torch.device("cuda"), torch.float32, torch.bfloat16
    assert not _hopper_conv.suits(device, single), "interpreted kernels have no Gluon"
    monkeypatch.setattr(_hopper_conv, "hopper", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert _hopper_conv.suits(device, single) and _hopper_conv.suits(device, half)
    assert not _hopper_conv.suits(device, torch.float64) and not _hopper_conv.suits(torch.device("cpu"), single)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not _hopper_conv.suits(device, single) and _hopper_conv.suits(device, half)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert not _hopper_conv.suits(device, single)


def test_convolutions_set_apart_from_rnns_are_asked_alone(monkeypatch):
    """``cudnn.allow_tf32`` raises then."""
    monkeypatch.setattr(_hopper_conv, "hopper", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        assert not _hopper_conv.suits(torch.device("cuda"), torch.float32)
    finally:
        torch.backends.cudnn.conv.fp32_precision = "tf32"
