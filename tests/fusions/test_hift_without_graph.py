"""HiFT where no graph serves: ten minutes, more rows than buckets have, no memory; the same code without a graph."""

import copy

import hift_classes
import pytest
import torch
from fake_arena import FakeArena

import voxfuse
from voxfuse.fusions import hift_graph
from voxfuse.fusions.graph_runner import capturing
from voxfuse.fusions.hift import decode, samples_per_frame
from voxfuse.kernels import istft, moments, snake, stft
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels._phases import PLAIN

CLOSE = 1e-5
TEN_MINUTES = 30_000  # mel frames of 20 ms
STAGES = ((256, 8), (128, 40), (64, 120))  # channels of the released HiFT and frames for each mel frame


@pytest.fixture(params=hift_classes.MODULES)
def hift(request):
    return hift_classes.generator(request.param)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture
def graphs(monkeypatch, request):
    """What the patch of ``decode`` calls, and its tally."""
    FakeArena.made = []
    monkeypatch.setattr(hift_graph, "unsupported", lambda hift, run, *tensors: hift_graph.unsuited(hift, *tensors))
    run = Run("reference", request.node.nodeid)
    return hift_graph.Runners(run, arena=FakeArena), TALLIES.of(run.receipt)


def inputs(hift, rows, frames):
    samples = frames * samples_per_frame(hift)
    mel = torch.randn(rows, hift.conv_pre.in_channels, frames)
    return mel, 0.1 * torch.sin(torch.arange(samples) * 0.04) + 0.02 * torch.randn(rows, 1, samples)


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def exact(hift, mel, source):
    double = copy.deepcopy(hift).double()
    double.stft_window = double.stft_window.double()
    return double.decode(x=mel.double(), s=source.double())


@pytest.mark.slow
@pytest.mark.parametrize("stack", hift_classes.MODULES)
def test_ten_minutes_within_the_contract(stack, graphs):
    small = {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
    hift = hift_classes.generator(stack, base_channels=8, **small)
    runners, tally = graphs
    mel, source = inputs(hift, 1, TEN_MINUTES)
    oracle = exact(hift, mel, source)
    bound = max(1.25 * relative_rms(hift.decode(x=mel, s=source), oracle), 2**-22)
    with capturing():
        audio = runners.decode(hift, mel, source)
    assert audio.shape == (1, TEN_MINUTES * 48) and relative_rms(audio, oracle) <= bound
    assert dict(tally.fallbacks) == {"a length outside 1 to 2048": 1} and tally.calls
    with voxfuse.apply_patches(stack, include=["snake_conv_block"], policy="all", backend="reference") as patches:
        assert relative_rms(hift.decode(x=mel, s=source), oracle) <= bound
        (receipt,) = (receipt for receipt in patches.receipts if receipt.status == "applied")
    blocks = [*hift.resblocks, *hift.source_resblocks]
    assert receipt.calls == sum(1 + 2 * len(block.convs1) for block in blocks) and not receipt.fallbacks


def test_more_rows_than_buckets_have_and_lengths_that_differ(hift, graphs):
    runners, tally = graphs
    mel, source = inputs(hift, 17, 3)
    lengths, per_frame = [1 + row % 3 for row in range(17)], samples_per_frame(hift)
    audio = runners.decode(hift, mel, source, lengths=lengths)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = hift.decode(mel[one, :, :length], source[one, :, : length * per_frame])
        assert relative_rms(audio[one, : length * per_frame], alone) < CLOSE
        assert torch.all(audio[row, length * per_frame :] == 0)
    (reason,) = tally.fallbacks
    assert reason.startswith("17 rows: graphs are captured for 1, 2")


def test_without_memory_for_a_graph(hift, graphs, monkeypatch):
    runners, tally = graphs
    monkeypatch.setattr(hift_graph, "MEMORY_CAP_BYTES", 1)
    mel, source = inputs(hift, 1, 4)
    with capturing(), pytest.warns(RuntimeWarning, match="above the memory cap of 1"):
        audio = runners.decode(hift, mel, source)
    assert relative_rms(audio, hift.decode(x=mel, s=source)) < CLOSE
    (reason,) = tally.fallbacks
    assert "above the memory cap of 1" in reason


@pytest.mark.parametrize("frames", [6, 17])
def test_a_hop_of_a_stream_ends_as_upstreams(graphs, frames):
    hift = hift_classes.generator("cosyvoice3")
    mel, source = inputs(hift, 2, frames)
    audio, expected = graphs[0].decode(hift, mel, source, finalize=False), hift.decode(mel, source, finalize=False)
    assert audio.shape == expected.shape and relative_rms(audio, expected) < CLOSE


def test_what_a_graph_would_not_run_is_left_to_upstream(hift, graphs):
    runners, tally = graphs
    mel, source = inputs(hift, 1, 4)
    assert isinstance(runners.decode(hift, mel, source), torch.Tensor)
    hift.resblocks[0].register_forward_hook(lambda *_: None)
    assert isinstance(runners.decode(hift, mel, source), str)
    assert sum(tally.fallbacks.values()) == 2


def test_a_row_of_too_many_elements_runs_the_reference_counted(hift, monkeypatch, request):
    """Whichever kernel a row is too long for."""
    for module in (snake, moments, stft, istft):
        monkeypatch.setattr(module, "MAX_ROW_ELEMENTS", 100)
    run = Run("interpreter", request.node.nodeid)
    mel, source = inputs(hift, 1, 4)
    audio = decode(hift, mel, source, None, run)
    assert relative_rms(audio, hift.decode(x=mel, s=source)) < CLOSE
    assert any("fewer than 2^31" in reason for reason in TALLIES.of(run.receipt).fallbacks)


@pytest.mark.parametrize(("minutes", "taken"), [(10, True), (90, True), (100, False)])
def test_limits_of_the_released_shapes(minutes, taken):
    """Snake takes every stage of a row of ten minutes, and says so where the last one's offsets end."""
    reasons = []
    for channels, per_frame in STAGES:
        frames = minutes * TEN_MINUTES // 10 * per_frame
        x = torch.empty(1, frames, channels, device="meta")
        alpha = torch.empty(channels, device="meta")
        reasons.append(snake.unsupported(x, alpha, x, alpha, None, frames, 1, *PLAIN, True))
    assert all(reason is None for reason in reasons[:2] if taken)
    assert (reasons[-1] is None) == taken and (taken or "2^31" in reasons[-1])
