"""What HiFT's whole decode must survive, with and without a graph, on the real classes: lengths, layouts, odd memory,
threads, a compiler around it. The blocks alone: test_hift_survival.py; ten minutes: test_hift_without_graph.py."""

import copy
import threading

import hift_classes
import pytest
import torch
from fake_arena import FakeArena

import voxfuse
from voxfuse.fusions import hift_graph
from voxfuse.fusions.hift import decode, samples_per_frame
from voxfuse.kernels._op import TALLIES, Run

CLOSE = 1e-5
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return request.param


@pytest.fixture
def hift(stack):
    return hift_classes.generator(stack)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def inputs(hift, rows, frames, device="cpu"):
    samples = frames * samples_per_frame(hift)
    source = 0.1 * torch.sin(torch.arange(samples) * 0.04) + 0.02 * torch.randn(rows, 1, samples)
    return torch.randn(rows, hift.conv_pre.in_channels, frames).to(device), source.to(device)


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.slow
@pytest.mark.parametrize("frames", [4095, 4096, 4097])
def test_lengths_beyond_every_bucket(stack, frames):
    small = {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1]]}
    hift = hift_classes.generator(stack, base_channels=8, **small)
    mel, source = inputs(hift, 1, frames)
    double = copy.deepcopy(hift).double()
    double.stft_window = double.stft_window.double()
    oracle = double.decode(x=mel.double(), s=source.double())
    bound = max(1.25 * relative_rms(hift.decode(x=mel, s=source), oracle), 2**-22)
    assert relative_rms(decode(hift, mel, source, None, Run("reference", "4096")), oracle) <= bound


@pytest.mark.parametrize("policy", ["warmup", "first_use"])
def test_transposed_and_strided_inputs(hift, policy, monkeypatch, request):
    """``warmup``: no graph is there; ``first_use``: one is."""
    monkeypatch.setattr(hift_graph, "unsupported", lambda *_: None)
    FakeArena.made = []
    run = Run("reference", request.node.nodeid)
    graphs = hift_graph.Runners(run, policy, FakeArena)
    mel, source = inputs(hift, 2, 7)
    expected = hift.decode(x=mel, s=source)
    wide = torch.stack([source, source.flip(0)], dim=-1)[..., 0]
    assert not wide.is_contiguous()
    found = graphs.decode(hift, mel.transpose(1, 2).contiguous().transpose(1, 2), wide)
    assert relative_rms(found, expected) < CLOSE
    assert bool(TALLIES.of(run.receipt).fallbacks) == (policy == "warmup")


def test_poisoned_memory_through_the_kernels(hift, poisoned_empty, request):
    run = Run("interpreter", request.node.nodeid)
    mel, source = inputs(hift, 2, 3)
    audio = decode(hift, mel, source, torch.tensor([3, 2]), run)
    per_frame = samples_per_frame(hift)
    assert relative_rms(audio[:1], hift.decode(x=mel[:1], s=source[:1])) < CLOSE
    assert relative_rms(audio[1:, : 2 * per_frame], hift.decode(mel[1:, :, :2], source[1:, :, : 2 * per_frame])) < CLOSE
    assert torch.all(audio[1, 2 * per_frame :] == 0) and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a compiled model")  # left behind on purpose, until the reset
def test_a_compiled_decode_has_no_graph_break():
    """Of our reference: upstream's own breaks at the NumPy integers in its strides."""
    if hift_classes.CHECKOUT:
        pytest.skip("a checkout is there, so the reference is not")
    hift = hift_classes.generator("cosyvoice3", resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1]])
    mel, source = inputs(hift, 1, 9)
    expected = hift.decode(mel, source)
    with voxfuse.apply_patches("cosyvoice3", policy="all", backend="reference") as patches:
        compiled = torch.compile(hift.decode, backend="aot_eager", fullgraph=True)
        assert relative_rms(compiled(mel, source), expected) < CLOSE
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "snake_conv_block")
        assert receipt.calls and not receipt.fallbacks
    torch.compiler.reset()


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=gpu) for rows in (1, 2, 16, 17, 32, 33)])
def test_rows_on_a_gpu(stack, hift, rows):
    mel, source = inputs(hift, rows, 21)
    expected = hift.decode(x=mel, s=source)
    hift, run = hift.cuda(), Run("triton", f"{stack} {rows} rows")
    found = hift_graph.Runners(run, "first_use").decode(hift, mel.cuda(), source.cuda())
    assert relative_rms(found.cpu(), expected) < 0.02  # TF32 on one side
    assert bool(TALLIES.of(run.receipt).fallbacks) == (rows > 16)


@pytest.mark.parametrize("frames", [pytest.param(frames, marks=gpu) for frames in (1, 2, 15, 16, 17, 4095, 4096, 4097)])
def test_lengths_on_a_gpu(stack, hift, frames):
    given = inputs(hift, 1, frames, "cuda")
    hift = hift.cuda()
    found = hift_graph.Runners(Run("triton", f"{stack} {frames} frames"), "first_use").decode(hift, *given)
    assert relative_rms(found, hift.decode(*given)) < 0.02  # TF32 in both


@pytest.mark.parametrize("turn", [pytest.param(turn, marks=gpu) for turn in range(5)])
def test_the_first_calls_of_threads_on_streams_of_their_own(hift, turn):
    """Nothing is packed yet: weights that one thread packs must be there before another one's stream reads them."""
    mel, source = inputs(hift, 2, 50, "cuda")
    hift = hift.cuda()
    expected = hift.decode(x=mel, s=source)
    torch.cuda.synchronize()
    graphs, begin, found = hift_graph.Runners(Run("triton", "first calls")), threading.Barrier(4), []

    def work():
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            begin.wait()
            audio = graphs.decode(hift, mel, source)
            torch.cuda.current_stream().synchronize()
            found.append(relative_rms(audio, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and max(found) < 0.02, found


@pytest.mark.parametrize("amp", [pytest.param(torch.float16, marks=gpu)])
def test_upstream_runs_itself_in_the_autocast_that_cosyvoice3_opens_with_fp16(stack, hift, amp):
    """Of upstream's ``token2wav``, CosyVoice3's calls HiFT inside ``autocast(self.fp16)``, CosyVoice2's behind it, and
    Chatterbox's opens none. Inside, every operation has a type of its own, so upstream's code runs, counted."""
    hift = hift.cuda()
    mel, _ = inputs(hift, 1, 12, "cuda")

    def infer():
        torch.manual_seed(5)
        with torch.autocast("cuda", amp):
            return hift.inference(mel)

    expected, source = infer()
    with voxfuse.apply_patches(stack, policy="all", include=["hift_graph", "hift_source_graph"]) as patches:
        audio, heard = infer()
        counted = [sum(receipt.fallbacks.values()) for receipt in patches.receipts if receipt.status == "applied"]
    assert (audio.dtype, heard.dtype) == (expected.dtype, source.dtype) and counted == [1, 1]
    assert relative_rms(heard, source) < 1e-3 and relative_rms(audio, expected) < 0.02
