"""Kokoro's decoder from CUDA graphs on a GPU, at the released shapes with random weights."""

import importlib.util
import threading

import pytest
import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

import voxfuse
from voxfuse.fusions import decoder_graph
from voxfuse.fusions.decoder_graph import BUCKETS, Runners
from voxfuse.fusions.graph_runner import WEIGHTS_REPLACED, capturing, runners
from voxfuse.fusions.kokoro_decoder import decode, draw_source
from voxfuse.kernels._op import TALLIES, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]
CLOSE = 1e-3  # relative RMS without TF32: fp32 rounding through the exponential; a leaking tail is above 0.05


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def decoder():
    from gpu_decoder import random_decoder

    return random_decoder(torch.device("cuda"))


@pytest.fixture
def exact_fp32(monkeypatch):
    """Convolutions in fp32, for which cuDNN wants gigabytes of workspace."""
    monkeypatch.setattr(decoder_graph, "MEMORY_CAP_BYTES", 2**36)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def inputs(frames, rows=1):
    from gpu_decoder import decoder_inputs

    return decoder_inputs(rows, frames / 40, torch.device("cuda"))


def seeded(call, *arguments, seed=3):
    torch.manual_seed(seed)
    return call(*arguments)


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def edges():
    """Both ends of every bucket up to 2 000 frames, and lengths between."""
    found = {*range(2, 34), *range(37, 2000, 61), 2000}
    for length in range(2, 2001):
        if BUCKETS.of(length) == length:
            found |= {length, min(length + 1, 2000)}
    return sorted(found)


def test_every_bucket_equals_the_call_without_one(decoder, exact_fp32):
    """Largest first: whatever a replay leaves behind in the arena would be heard in a shorter one."""
    run = Run("triton", "bucket sweep")
    graphs = Runners(run, "first_use")
    worst = {}
    for frames in reversed(edges()):
        asr, f0, energy, style = inputs(frames)
        torch.manual_seed(3)
        source = draw_source(decoder.generator, f0)
        alone = decode(decoder, asr, f0, energy, style, source, None, run)
        replayed = seeded(graphs.decoder, decoder, asr, f0, energy, style)
        assert not isinstance(replayed, str), replayed
        assert replayed.shape == alone.shape == (1, 1, 600 * frames)
        worst[frames] = relative_rms(replayed, alone)
    wrong = {frames: error for frames, error in worst.items() if not error < CLOSE}
    assert not wrong, f"{len(wrong)} of {len(worst)} lengths differ, such as {list(wrong.items())[:5]}"
    assert not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_replays_sound_as_upstream(decoder, exact_fp32, rows):
    graphs = Runners(Run("triton", "upstream"), "first_use")
    for frames in (100, 33, 90, 7):
        given = inputs(frames, rows)
        expected = seeded(decoder, *given)
        replayed = seeded(graphs.decoder, decoder, *given)
        assert not isinstance(replayed, str), replayed
        # The frames at both ends have a phase of pi or -pi as rounding decides, which instance norm spreads.
        assert relative_rms(replayed[..., 300:-300], expected[..., 300:-300]) < 0.02
        assert torch.equal(seeded(graphs.decoder, decoder, *given), replayed), "a replay differs from itself"


def test_a_row_of_a_mixed_batch_ends_as_alone(decoder, exact_fp32):
    graphs = Runners(Run("triton", "mixed"), "first_use")
    asr, f0, energy, style = inputs(80, 4)
    lengths = [80, 3, 41, 64]
    audio = seeded(lambda: graphs.decoder(decoder, asr, f0, energy, style, lengths=lengths))
    torch.manual_seed(3)
    source = draw_source(decoder.generator, f0)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = decode(
            decoder, asr[one, :, :length], f0[one, : 2 * length], energy[one, : 2 * length], style[one],
            source[one, : 600 * length], None, Run("triton", "alone"),
        )  # fmt: skip
        assert relative_rms(audio[one, :, : 600 * length], alone) < CLOSE
        assert torch.all(audio[row, :, 600 * length :] == 0)


def test_launches_of_an_utterance(decoder):
    """Device activities and what the host launches, for 10 s: a regression test of figures that a profile showed."""
    given = inputs(400)

    def launched():
        decoder(*given)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            decoder(*given)
            torch.cuda.synchronize()
        events = found.events()
        device = sum(event.device_type == DeviceType.CUDA for event in events)
        host = sum("Launch" in event.name and event.device_type == DeviceType.CPU for event in events)
        return device, host

    before = launched()
    with voxfuse.apply_patches(decoder, policy="all", include=["decoder_graph", "sine_source"]):
        with capturing():
            decoder(*given)
        after = launched()
    assert before[0] > 1000 and before[1] > 1000
    assert after[0] < 360 and after[1] < 40, after


def test_new_weights_are_captured_anew_and_the_receipt_says_so():
    from kokoro.istftnet import Generator

    generator = Generator(
        16, resblock_kernel_sizes=[3, 7], upsample_rates=[4, 2], upsample_initial_channel=64,
        resblock_dilation_sizes=[[1, 3, 5]] * 2, upsample_kernel_sizes=[8, 4], gen_istft_n_fft=20, gen_istft_hop_size=5,
    ).eval().cuda()  # fmt: skip
    x, style, f0 = torch.randn(1, 64, 20), torch.randn(1, 16), torch.rand(1, 20) * 200 + 80
    given = [tensor.cuda() for tensor in (x, style, f0)]
    with voxfuse.apply_patches(generator, policy="all", include=["decoder_graph"]) as patches:
        with capturing():
            generator(*given)
        before = seeded(generator, *given)
        for up in generator.ups:
            up.weight_g.mul_(1.5)
        after = seeded(generator, *given)
        receipts = [receipt for receipt in patches.receipts if receipt.status == "applied"]
        assert {reason: n for receipt in receipts for reason, n in receipt.fallbacks.items()} == {WEIGHTS_REPLACED: 1}
        with patches.paused():
            expected = seeded(generator, *given)
    assert relative_rms(after[..., 100:-100], expected[..., 100:-100]) < 0.02
    assert relative_rms(before, expected) > 0.05


def test_a_capture_that_lacks_memory_falls_back_and_is_counted(decoder, monkeypatch):
    given = inputs(50)
    expected = seeded(decoder, *given)
    for cap, reason in ((1, "above the memory cap of 1"), (2**34, "out of memory")):
        monkeypatch.setattr(decoder_graph, "MEMORY_CAP_BYTES", cap)
        run = Run("triton", f"cap {cap}")
        graphs = Runners(run, "first_use")
        torch.cuda.empty_cache()
        if "out of memory" in reason:
            used = torch.cuda.memory_reserved() + 20 * 2**20
            torch.cuda.set_per_process_memory_fraction(used / torch.cuda.get_device_properties(0).total_memory)
        try:
            with pytest.warns(RuntimeWarning):
                refused = seeded(graphs.decoder, decoder, *given)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert isinstance(refused, str) and reason in refused.lower()
        assert TALLIES.of(run.receipt).fallbacks == {refused: 1}
        assert torch.equal(seeded(decoder, *given), expected), "the decoder is not usable any more"


def test_two_threads_and_two_models():
    from gpu_decoder import random_decoder

    models = [random_decoder.__wrapped__(torch.device("cuda")) for _ in range(2)]
    lengths = [(60, 9, 33), (45, 70, 12)]
    with voxfuse.apply_patches("kokoro", policy="all", include=["decoder_graph"]):
        given = [[inputs(frames) for frames in chosen] for chosen in lengths]
        with capturing():
            for model, sets in zip(models, given, strict=True):
                for tensors in sets:
                    model(*tensors)
        assert all(runner.statistics.captures for model in models for runner in runners(model))
        run = Run("triton", "threads")
        sources = [
            [draw_source(model.generator, s[1]) for s in sets] for model, sets in zip(models, given, strict=True)
        ]
        by_runner = [runners(model)[0] for model in models]
        expected = [
            [runner(*s, source) for s, source in zip(sets, drawn, strict=True)]
            for runner, sets, drawn in zip(by_runner, given, sources, strict=True)
        ]
        torch.cuda.synchronize()
        faults = []

        def work(index):
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(60):
                    which = turn % 3
                    audio = by_runner[index](*given[index][which], sources[index][which])
                    if not torch.equal(audio, expected[index][which]):
                        faults.append((index, which, turn))

        threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1, 0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
    assert not faults and not TALLIES.of(run.receipt).fallbacks
