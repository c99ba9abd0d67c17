"""HiFT's decoder from CUDA graphs on a GPU, at the released shapes with random weights."""

import threading

import hift_classes
import pytest
import torch

import voxfuse
from voxfuse.fusions import hift_graph
from voxfuse.fusions.graph_runner import WEIGHTS_REPLACED, capturing, runners
from voxfuse.fusions.hift import decode
from voxfuse.fusions.hift_graph import BUCKETS, Runners
from voxfuse.kernels._op import TALLIES, Run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
CLOSE = 1e-3  # relative RMS without TF32: fp32 rounding through the exponential; a leaking tail is above 0.01
PER_FRAME = 480


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return request.param


@pytest.fixture(scope="module")
def hift(stack):
    return hift_classes.released(stack)


@pytest.fixture
def exact_fp32(monkeypatch):
    """Convolutions in fp32, for which cuDNN wants gigabytes of workspace."""
    monkeypatch.setattr(hift_graph, "MEMORY_CAP_BYTES", 2**36)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def inputs(frames, rows=1):
    source = 0.1 * torch.sin(torch.arange(frames * PER_FRAME, device="cuda") * 0.04)
    return torch.randn(rows, 80, frames, device="cuda"), source + 0.02 * torch.randn(
        rows, 1, frames * PER_FRAME, device="cuda"
    )


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def edges():
    """Both ends of every bucket up to 1 000 frames, and lengths between."""
    found = {*range(1, 34), *range(37, 1000, 61), 1000}
    for length in range(1, 1001):
        if BUCKETS.of(length) == length:
            found |= {length, min(length + 1, 1000)}
    return sorted(found)


def test_every_bucket_equals_upstream(hift, stack, exact_fp32):
    """Largest first: whatever a replay leaves behind in the arena would be heard in a shorter one."""
    run = Run("triton", f"{stack} bucket sweep")
    graphs = Runners(run, "first_use")
    worst = {}
    for frames in reversed(edges()):
        mel, source = inputs(frames)
        replayed = graphs.decode(hift, mel, source)
        assert not isinstance(replayed, str), replayed
        expected = hift.decode(x=mel, s=source)
        assert replayed.shape == expected.shape == (1, PER_FRAME * frames)
        worst[frames] = relative_rms(replayed, expected)
    wrong = {frames: error for frames, error in worst.items() if not error < CLOSE}
    assert not wrong, f"{len(wrong)} of {len(worst)} lengths differ, such as {list(wrong.items())[:5]}"
    assert not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("tf32", [True, False])
def test_as_precise_as_upstream(hift, tf32, monkeypatch):
    """The error against fp64 at most 1.25 times eager's, pooled over utterances."""
    import copy

    monkeypatch.setattr(hift_graph, "MEMORY_CAP_BYTES", 2**36)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    double = copy.deepcopy(hift).double()
    double.stft_window = double.stft_window.double()
    run = Run("triton", "hift precision")
    errors = []
    for frames, rows in ((100, 1), (37, 2), (250, 1)):
        mel, source = inputs(frames, rows)
        oracle = double.decode(x=mel.double(), s=source.double())
        fused = decode(hift, mel, source, None, run)
        errors.append([relative_rms(value, oracle) for value in (hift.decode(x=mel, s=source), fused)])
    eager, fused = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert fused <= max(1.25 * eager, 2**-23), errors
    assert not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_replays_are_the_same_each_time(hift, rows):
    graphs = Runners(Run("triton", "hift repeats"), "first_use")
    for frames in (100, 33, 90, 7):
        given = inputs(frames, rows)
        replayed = graphs.decode(hift, *given)
        assert not isinstance(replayed, str), replayed
        assert relative_rms(replayed, hift.decode(*given)) < 0.02  # TF32 in both
        assert torch.equal(graphs.decode(hift, *given), replayed), "a replay differs from itself"


def test_a_row_of_a_mixed_batch_ends_as_alone(hift, exact_fp32):
    graphs = Runners(Run("triton", "hift mixed"), "first_use")
    mel, source = inputs(80, 5)
    lengths = [80, 3, 41, 64, 1]
    audio = graphs.decode(hift, mel, source, lengths=lengths)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = hift.decode(mel[one, :, :length], source[one, :, : PER_FRAME * length])
        assert relative_rms(audio[one, : PER_FRAME * length], alone) < CLOSE
        assert torch.all(audio[row, PER_FRAME * length :] == 0)


def test_inference_by_class_with_a_cached_source_and_new_weights(hift, stack, exact_fp32):
    mel, cache = inputs(60)[0], torch.randn(1, 1, 2400, device="cuda") * 0.1

    def infer():
        torch.manual_seed(3)
        torch.cuda.manual_seed(3)
        return hift.inference(mel) if stack == "cosyvoice3" else hift.inference(mel, cache)

    expected, source = infer()
    fusions = ["hift_graph", "snake_conv_block"]
    with voxfuse.apply_patches(stack, include=fusions, policy="all") as patches:
        with capturing():
            infer()
        audio, heard = infer()
        assert torch.equal(heard, source) and relative_rms(audio, expected) < CLOSE
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "hift_graph")
        assert receipt.status == "applied" and receipt.calls and not receipt.fallbacks
        gain = hift.ups[0].parametrizations.weight.original0
        gain.mul_(1.5)
        try:
            audio, _ = infer()
            (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "hift_graph")
            assert dict(receipt.fallbacks) == {WEIGHTS_REPLACED: 1}
            with patches.paused():
                assert relative_rms(audio, infer()[0]) < CLOSE
        finally:
            gain.div_(1.5)


def test_a_length_without_a_graph_runs_the_same_code_without_one(hift, stack, exact_fp32):
    given = inputs(50)
    expected = hift.decode(*given)
    with voxfuse.apply_patches(stack, include=["hift_graph", "snake_conv_block"], policy="all") as patches:
        assert relative_rms(hift.decode(*given), expected) < CLOSE
        receipts = {receipt.fusion: receipt for receipt in patches.receipts}
        assert not receipts["snake_conv_block"].calls and receipts["hift_graph"].calls > 7 * 12
        (reason,) = receipts["hift_graph"].fallbacks
        assert "no graph of 1 rows" in reason
    assert relative_rms(hift.decode(*given), expected) < CLOSE  # cuDNN's transposed convolutions sum in any order


def test_ten_minutes_without_a_graph(hift, stack):
    """Offsets stay below 2^31 in every kernel: a row of the last stage has 230 million elements."""
    given = inputs(30_000)
    expected = hift.decode(*given)
    with voxfuse.apply_patches(stack, include=["hift_graph"], policy="all") as patches:
        assert relative_rms(hift.decode(*given), expected) < 0.02  # TF32 in both
        (receipt,) = (receipt for receipt in patches.receipts if receipt.status == "applied")
        assert dict(receipt.fallbacks) == {"a length outside 1 to 2048": 1} and receipt.calls


def test_f0_and_source_replayed_are_upstreams(hift, stack, exact_fp32):
    """Same random numbers, on both devices; what differs is upstream's own drift of the phase."""

    def infer(frames):
        torch.manual_seed(3)
        torch.cuda.manual_seed(3)
        result = hift.inference(inputs(frames)[0])
        return *result, torch.get_rng_state(), torch.cuda.get_rng_state()

    lengths = (60, 1, 17, 100)
    torch.manual_seed(9)
    expected = {frames: infer(frames) for frames in lengths}
    with voxfuse.apply_patches(stack, include=["hift_graph", "hift_source_graph"], policy="all") as patches:
        with capturing():
            for frames in lengths:
                infer(frames)
        for frames in lengths:
            audio, source, *states = infer(frames)
            theirs, heard, *their_states = expected[frames]
            assert all(torch.equal(*pair) for pair in zip(states, their_states, strict=True)), "other random numbers"
            assert source.shape == heard.shape and audio.shape == theirs.shape
            assert relative_rms(source, heard) < (1e-4 if stack == "cosyvoice3" else 0.05)
        receipts = {receipt.fusion: receipt for receipt in patches.receipts if receipt.status == "applied"}
        assert receipts["hift_source_graph"].calls >= 2 * len(lengths)
        assert not receipts["hift_source_graph"].fallbacks and not receipts["hift_graph"].fallbacks


def test_a_stream_of_hops(hift, stack, exact_fp32):
    """CosyVoice3: the whole mel so far at each hop; one graph serves what goes on and what ends."""
    if stack != "cosyvoice3":
        pytest.skip("not causal")
    mel = torch.randn(1, 80, 90, device="cuda")
    hops = [(end, end == 90) for end in (33, 58, 90)]
    expected = [hift.inference(mel[:, :, :end], finalize=finalize)[0] for end, finalize in hops]
    with voxfuse.apply_patches(stack, include=["hift_graph", "hift_source_graph"], policy="all") as patches:
        with capturing():
            for end, finalize in hops:
                hift.inference(mel[:, :, :end], finalize=finalize)
        for (end, finalize), theirs in zip(hops, expected, strict=True):
            audio, _ = hift.inference(mel[:, :, :end], finalize=finalize)
            assert audio.shape == theirs.shape and relative_rms(audio, theirs) < CLOSE
        assert not any(receipt.fallbacks for receipt in patches.receipts if receipt.status == "applied")


def test_two_threads_on_streams_of_their_own(hift, stack):
    run = Run("triton", f"{stack} threads")
    graphs = Runners(run, "first_use")
    given = [inputs(frames) for frames in (60, 9, 33)]
    expected = [graphs.decode(hift, *one) for one in given]
    torch.cuda.synchronize()
    faults = []

    def work(offset):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(60):
                which = (turn + offset) % 3
                if not torch.equal(graphs.decode(hift, *given[which]), expected[which]):
                    faults.append((offset, which, turn))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not faults and not TALLIES.of(run.receipt).fallbacks
    (*_, runner) = runners(hift)
    assert runner.statistics.replays
