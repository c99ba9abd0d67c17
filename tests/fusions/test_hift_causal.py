"""CosyVoice3's causal HiFT: ``finalize=False``, streaming, causal convolutions, against the untouched module."""

import hift_classes
import pytest
import torch
from fake_arena import FakeArena
from torch import nn

import voxfuse
from voxfuse.fusions import hift_graph, polyphase
from voxfuse.fusions.graph_runner import capturing, runners
from voxfuse.fusions.hift import decode, samples_per_frame
from voxfuse.kernels._conv_plan import Plan
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels._phases import from_phases, to_phases
from voxfuse.kernels.conv1d import (
    STRATEGIES,
    conv_unsupported,
    convolved,
    convolved_plain,
    layout_for,
    packed_weight,
)
from voxfuse.patches import registry
from voxfuse.patches.guards import resolve

CLOSE = 1e-5
REFERENCE = Run("reference", "causal hift")


@pytest.fixture
def module():
    return hift_classes.upstream("cosyvoice3")


@pytest.fixture
def hift(module):
    return hift_classes.generator("cosyvoice3")


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def inputs(hift, rows, frames):
    samples = frames * samples_per_frame(hift)
    mel = torch.randn(rows, hift.conv_pre.in_channels, frames)
    return mel, 0.1 * torch.sin(torch.arange(samples) * 0.04) + 0.02 * torch.randn(rows, 1, samples)


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def convolution(module, kind, **settings):
    """A causal convolution of upstream's; all three are in the module of the block."""
    blocks = module.ResBlock(8, 3, [1], causal=True)
    home = __import__(type(blocks.convs1[0]).__mro__[1].__module__, fromlist=["x"])
    return vars(home)[kind](4, 6, **settings)


# --- convolutions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", STRATEGIES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("taps", "dilation"), [(3, 1), (7, 1), (1, 1), (11, 1), (3, 3), (5, 5)])
def test_padding_on_one_side_without_a_copy(module, axis, side, taps, dilation):
    conv = convolution(module, "CausalConv1d", kernel_size=taps, dilation=dilation, causal_type=side)
    if side == "right" and dilation > 1:
        assert "no dilation" in conv_unsupported(conv)
        return
    assert conv_unsupported(conv) is None
    for frames in (1, 2, 15, 16, 17):
        x = torch.randn(2, 4, frames)
        expected = conv(x)
        found = []
        for together in (1, 2, 4):
            plan = Plan(axis, together)
            laid = to_phases(x.transpose(1, 2), *layout_for(conv, plan, frames))
            found.append(from_phases(convolved(conv, laid, plan), frames, dilation))
        if dilation == 1:
            found.append(convolved_plain(conv, x.transpose(1, 2).contiguous(), packed_weight(conv), axis))
        for y in found:
            assert y.shape[1] == frames
            assert torch.allclose(y.transpose(1, 2) + conv.bias[:, None], expected, atol=1e-5)


@pytest.mark.parametrize(("taps", "stride"), [(16, 8), (11, 5), (7, 3), (1, 2), (2, 2), (3, 1), (8, 3)])
@pytest.mark.parametrize("frames", [1, 2, 9])
def test_repeated_frames_are_never_made(module, taps, stride, frames):
    conv = convolution(module, "CausalConv1dUpsample", kernel_size=taps, stride=stride)
    assert polyphase.unsupported(conv) is None and polyphase.factor(conv) == stride
    x = torch.randn(3, 4, frames)
    expected = conv.double()(x.double())
    y = polyphase.upsample(conv.float(), x.transpose(1, 2).contiguous())
    assert torch.allclose((y.transpose(1, 2) + conv.bias[:, None]).double(), expected, atol=1e-5)
    front = y.as_strided((3, stride, 6), y.stride(), y.storage_offset() - stride * y.stride(1))
    assert torch.all(front == 0), "the room in front must be finite, and is what no frame meets"


def test_upsampling_that_is_not_upstreams_is_refused(module):
    def broken(**changes):
        conv = convolution(module, "CausalConv1dUpsample", kernel_size=7, stride=3)
        for name, value in changes.items():
            setattr(conv, name, value)
        return polyphase.unsupported(conv)

    assert "nearest upsampling" in broken(upsample=nn.Upsample(scale_factor=3, mode="linear"))
    assert "nearest upsampling" in broken(upsample=nn.Upsample(size=30))
    assert "padding in front" in broken(causal_padding=5) and "padding in front" in broken(dilation=(2,))
    conv = convolution(module, "CausalConv1dUpsample", kernel_size=7, stride=3)
    conv.upsample.register_forward_hook(lambda *_: None)
    assert "hooks" in polyphase.unsupported(conv)


# --- finalize ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [6, 7, 15, 16, 17])
def test_more_will_follow(hift, frames):
    """Frames that are only looked at; whatever lies behind the row's end."""
    mel, source = inputs(hift, 2, frames)
    per_frame, ahead = samples_per_frame(hift), hift.conv_pre_look_right
    expected = hift.decode(mel, source, finalize=False)
    samples = (frames - ahead - 1) * per_frame
    assert expected.shape == (2, samples)
    dirty = [
        torch.cat([t, torch.full((*t.shape[:2], more), float("nan"))], 2)
        for t, more in ((mel, 3), (source, 3 * per_frame))
    ]
    held = torch.full((2,), ahead)
    found = decode(hift, *dirty, torch.full((2,), frames), REFERENCE, held)
    assert relative_rms(found[:, :samples], expected) < CLOSE
    assert torch.all(found[:, samples + per_frame :] == 0)
    assert relative_rms(decode(hift, mel, source, None, REFERENCE, held)[:, :samples], expected) < CLOSE


def test_rows_that_end_and_rows_that_go_on_in_one_call(hift):
    mel, source = inputs(hift, 3, 12)
    lengths, ahead = torch.tensor([12, 9, 12]), torch.tensor([0, 4, 4])
    found = decode(hift, mel, source, lengths, REFERENCE, ahead)
    per_frame = samples_per_frame(hift)
    for row, (frames, held) in enumerate(zip(lengths.tolist(), ahead.tolist(), strict=True)):
        one = mel[row : row + 1, :, :frames], source[row : row + 1, :, : frames * per_frame]
        expected = hift.decode(*one, finalize=held == 0)
        assert relative_rms(found[row : row + 1, : expected.shape[1]], expected) < CLOSE


# --- patches -------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch, request):
    """``decode`` replaced with a fake arena on the CPU, and upstream's; the receipt's tally."""
    FakeArena.made = []
    monkeypatch.setattr(hift_graph, "unsupported", lambda hift, run, *tensors: hift_graph.unsuited(hift, *tensors))
    real = hift_graph.Runners
    monkeypatch.setattr(hift_graph, "Runners", lambda *args, **options: real(*args, arena=FakeArena, **options))
    hift_classes.upstream("cosyvoice3")
    patches = registry.patches_of("cosyvoice3").patches
    patch = next(patch for patch in patches if patch.fusion is hift_graph.HIFT_GRAPH)
    cls = resolve(patch.target).owner
    original = cls.decode
    run = Run("reference", request.node.nodeid)
    monkeypatch.setattr(cls, "decode", patch.build(original, run))
    return original, TALLIES.of(run.receipt)


def test_a_stream_replayed_chunk_by_chunk_is_upstreams(hift, graphs):
    """As CosyVoice3Model.token2wav has it: the whole mel so far at each hop, the new samples of the answer."""
    original, tally = graphs
    mel = torch.randn(1, hift_classes.BINS, 31)
    hift.f0_predictor.double()
    spoken, offset = [], 0
    with capturing():
        for end in (12, 20, 31):
            finalize = end == 31
            audio, source = hift.inference(mel[:, :, :end], finalize=finalize)
            given = mel[:, :, :end] if finalize else mel[:, :, : end - 3]
            assert relative_rms(audio, original(hift, given, source, finalize)) < CLOSE
            spoken.append(audio[:, offset:])
            offset += spoken[-1].shape[1]
    whole, _ = hift.inference(mel)
    assert relative_rms(torch.cat(spoken, 1), whole) < 1e-4, "the chunks do not join"
    (runner,) = runners(hift)
    assert runner.statistics.replays == 4 and not tally.fallbacks  # the whole has the bucket of the last hop


def test_one_graph_serves_the_end_and_what_comes_before(hift, graphs):
    original, tally = graphs
    mel, source = inputs(hift, 2, 14)
    with capturing():
        for finalize in (True, False, True):
            expected = original(hift, mel, source, finalize)
            audio = hift.decode(mel, source, finalize=finalize)
            assert audio.shape == expected.shape and relative_rms(audio, expected) < CLOSE
    (runner,) = runners(hift)
    assert (runner.statistics.captures, runner.statistics.replays) == (1, 3) and not tally.fallbacks


def test_too_few_frames_where_more_will_follow_are_upstreams_matter(hift, graphs):
    original, tally = graphs
    mel, source = inputs(hift, 1, 5)
    with capturing():
        expected = original(hift, mel, source, False)
        assert expected.shape[1] == 0 or expected.isfinite().all()
        assert torch.equal(hift.decode(mel, source, finalize=False), expected)
    (reason,) = tally.fallbacks
    assert reason == "5 frames or fewer, where more will follow, leave no audio"


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_causal_blocks_with_the_stack_by_name(hift, module, backend):
    mel, source = inputs(hift, 1, 4)
    baseline = hift.decode(mel, source)
    with voxfuse.apply_patches("cosyvoice3", policy="all", backend=backend) as patches:
        audio = hift.decode(mel, source)
        receipts = {receipt.fusion: receipt for receipt in patches.receipts}
    blocks = len(hift.resblocks) + len(hift.source_resblocks)
    assert (receipts["snake_conv_block"].calls, dict(receipts["snake_conv_block"].fallbacks)) == (7 * blocks, {})
    assert receipts["hift_graph"].status == "skipped"
    assert relative_rms(audio, baseline) < CLOSE
    assert torch.equal(hift.decode(mel, source), baseline)
