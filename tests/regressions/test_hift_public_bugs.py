"""Public faults of vocoders with HiFT, each by its thread."""

import copy

import hift_classes
import pytest
import torch
from fake_arena import FakeArena

import voxfuse
from voxfuse.fusions import hift_graph
from voxfuse.fusions.graph_runner import OUTER_CAPTURE, capturing, runners
from voxfuse.fusions.hift import decode, samples_per_frame
from voxfuse.kernels._op import TALLIES, Run

REFERENCE = Run("reference", "public faults of hift")


@pytest.fixture(params=hift_classes.MODULES)
def hift(request):
    hift_classes.upstream(request.param)
    return hift_classes.generator(request.param)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def inputs(hift, rows, frames):
    samples = frames * samples_per_frame(hift)
    return torch.randn(rows, hift_classes.BINS, frames), 0.1 * torch.randn(rows, 1, samples)


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def test_tails_of_right_padded_rows(hift):
    """sglang-omni #1844 (and #1655, which grouped by exact length instead): a shorter row of a batch hears, near its
    end, the padding behind it, since every convolution looks at frames behind its own."""
    mel, source = inputs(hift, 2, 14)
    mel[1, :, 9:], source[1, :, 9 * samples_per_frame(hift) :] = 0, 0
    alone = hift.decode(x=mel[1:, :, :9], s=source[1:, :, : 9 * samples_per_frame(hift)])
    padded = hift.decode(x=mel, s=source)[1:, : alone.shape[1]]
    assert relative_rms(padded, alone) > 1e-3, "upstream's own batch has the fault"
    ours = decode(hift, mel, source, torch.tensor([14, 9]), REFERENCE)[1:, : alone.shape[1]]
    assert relative_rms(ours, alone) < 1e-5


def test_a_rewrite_is_compared_with_fp64_and_not_with_fp32(hift):
    """vllm-omni #7521, NeMo Speech #16121: 1.5e-3 between two fp32 vocoders was reassociation; fp64 agreed to 1e-12."""
    double = copy.deepcopy(hift).double()
    double.stft_window = double.stft_window.double()
    mel, source = inputs(hift, 1, 9)
    exact = double.decode(x=mel.double(), s=source.double())
    eager, ours = (
        relative_rms(audio, exact)
        for audio in (hift.decode(x=mel, s=source), decode(hift, mel, source, None, REFERENCE))
    )
    assert ours <= max(1.25 * eager, 2**-23) * 2, "a single utterance's error is luck to a factor of two"


def test_nothing_in_decode_waits_for_the_device(hift):
    """vllm-omni #5869: torch.istft checks its window on the host (NOLA), so the vocoder could not be captured whole."""
    forbidden = {"aten::istft", "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"}
    mel, source = inputs(hift, 1, 5)
    run = Run("interpreter", "no host sync")
    decode(hift, mel, source, torch.tensor([5]), run)  # packs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as upstream:
        hift.decode(x=mel, s=source)
    assert forbidden & {event.key for event in upstream.key_averages()}, "upstream has what must be absent from ours"
    names = []
    original = torch.istft
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "istft", lambda *args, **kwargs: names.append("istft") or original(*args, **kwargs))
        decode(hift, mel, source, torch.tensor([5]), run)
    assert not names and not TALLIES.of(run.receipt).fallbacks


def test_a_replay_inside_an_outer_capture(hift, monkeypatch, request):
    """vllm-omni #2910: a graph replayed while an outer graph is captured. Ours runs the kernels into the outer one."""
    FakeArena.made = []
    monkeypatch.setattr(hift_graph, "unsupported", lambda *_: None)
    graphs = hift_graph.Runners(Run("reference", request.node.nodeid), "first_use", FakeArena)
    mel, source = inputs(hift, 1, 4)
    expected = graphs.decode(hift, mel, source)
    (runner,) = runners(hift)
    monkeypatch.setattr(runner, "find", lambda *_: OUTER_CAPTURE)
    assert graphs.decode(hift, mel, source) is OUTER_CAPTURE, "the patch then runs upstream's code into the capture"
    assert (runner.statistics.direct, runner.statistics.replays) == (1, 1) and expected.isfinite().all()


def test_graphs_are_there_after_patching_and_their_count_is_seen(hift, monkeypatch, request):
    """sglang-omni #798, #2263: the graph runner existed and had captured nothing, in silence."""
    FakeArena.made = []
    monkeypatch.setattr(hift_graph, "unsupported", lambda *_: None)
    run = Run("reference", request.node.nodeid)
    graphs = hift_graph.Runners(run, "warmup", FakeArena)
    mel, source = inputs(hift, 1, 4)
    assert relative_rms(graphs.decode(hift, mel, source), hift.decode(x=mel, s=source)) < 1e-5
    ((reason, count),) = TALLIES.of(run.receipt).fallbacks.items()
    assert "no graph of 1 rows" in reason and count == 1
    with capturing():
        graphs.decode(hift, mel, source)
    (runner,) = runners(hift)
    assert (runner.statistics.captures, runner.statistics.replays) == (1, 1)


def test_a_source_longer_than_any_block_stays_fused(request):
    """sglang-omni #2263: the kernel's limit of 65,536 frames was below the real 122,880, and eager ran in silence."""
    block = hift_classes.upstream("cosyvoice2").ResBlock(2, 3, [1]).eval()
    x = torch.randn(1, 2, 122_881)
    with voxfuse.apply_patches("cosyvoice2", policy="all", backend="reference") as patches:
        found = block(x)
        (receipt,) = (r for r in patches.receipts if r.fusion == "snake_conv_block")
    assert not receipt.fallbacks and receipt.calls == 3
    assert relative_rms(found, block(x)) < 1e-6
