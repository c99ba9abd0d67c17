"""The length-aware decoder on the real Kokoro classes: padded to a bucket, mixed, and replayed, against upstream."""

import copy
import importlib.util

import pytest
import torch
from fake_arena import FakeArena

from voxfuse.fusions import decoder_graph
from voxfuse.fusions.decoder_graph import Runners, unsupported
from voxfuse.fusions.graph_runner import capturing, runners
from voxfuse.fusions.kokoro_decoder import decode, draw_source, generate, samples_per_frame
from voxfuse.fusions.spectral import magnitude_and_phase
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches import apply_patches
from voxfuse.patches._kokoro_import import load_kokoro

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kokoro") is None, reason="the kokoro package is absent")

STYLE, CHANNELS = 16, 32
CLOSE = 1e-5  # relative RMS: fp32 roundings amplified by exp; a tail that leaks is above 1e-3
ISTFTNET = {
    "resblock_kernel_sizes": [3, 7],
    "upsample_rates": [4, 2],
    "upsample_initial_channel": CHANNELS,
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
    "upsample_kernel_sizes": [8, 4],
    "gen_istft_n_fft": 20,
    "gen_istft_hop_size": 5,
}
REFERENCE = Run("reference", "decoder test")


@pytest.fixture
def istftnet():
    load_kokoro()
    import kokoro.istftnet

    return kokoro.istftnet


def trained(module):
    """Random parameters where upstream's initial ones hide a mistake: alpha, instance norms, biases."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "alpha" in name or name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "fc.weight")):
                parameter.normal_(0, 0.2)
            elif name.endswith("weight_g") and "conv_post" not in name:
                parameter.mul_(2)  # upstream's initial convolutions are nearly silent
    return module.eval()


@pytest.fixture
def generator(istftnet):
    return trained(istftnet.Generator(STYLE, **ISTFTNET))


@pytest.fixture
def decoder(istftnet):
    """Decoder fixes 1024 and 512 channels of its own: slow here, so only a few tests use it."""
    return trained(istftnet.Decoder(512, STYLE, 80, **(ISTFTNET | {"upsample_initial_channel": 512})))


def inputs(rows, frames):
    x, style = torch.randn(rows, CHANNELS, frames), torch.randn(rows, STYLE)
    return x, style, torch.rand(rows, frames) * 200 + 80


def upstream(module, *arguments):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(5)
        return module(*arguments)


def source_of(generator, f0):
    """The source that ``upstream`` hears."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return draw_source(generator, f0)


def padded(tensor, frames, fill):
    """The last axis extended to ``frames`` by what must not matter."""
    tail = torch.full((*tensor.shape[:-1], frames - tensor.shape[-1]), fill)
    return torch.cat([tensor, tail], dim=-1)


def oracle(generator, x, style, source, run=REFERENCE):
    """Upstream's forward in fp64 on the fp32 spectrum of the fp32 source: a phase of -pi instead of pi, which rounding
    decides, is another input of the network."""
    double = copy.deepcopy(generator).double()
    spectrum = magnitude_and_phase(generator.stft, source, run)
    double.m_source.forward = lambda f0: (source.unsqueeze(-1), None, None)
    double.stft.transform = lambda _: tuple(part.double() for part in spectrum)
    double.stft.window = double.stft.window.double()
    with torch.no_grad():
        return double(x.double(), style.double(), torch.zeros(x.shape[0], x.shape[2], dtype=torch.float64))


def relative_rms(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


def padded_call(generator, x, style, source, bucket, fill, run):
    """The waveform from tensors padded to a bucket with what must not matter, cut to length, and the rest of it."""
    frames, per_frame = x.shape[2], samples_per_frame(generator)
    x, source = padded(x, bucket, fill), padded(source, bucket * per_frame, fill)
    with torch.no_grad():
        audio = generate(generator, x, style, source, torch.tensor([frames]), run)
    return audio.split([frames * per_frame, (bucket - frames) * per_frame], dim=-1)


def test_padded_buckets_equal_upstream_at_every_length(generator):
    """Errors against fp64 pooled over the lengths: a single utterance's are luck to a factor of two."""
    errors = []
    for frames in (1, 2, 3, 5, 8, 13, 16, 31):
        x, style, f0 = inputs(1, frames)
        source = source_of(generator, f0)
        baseline, expected = upstream(generator, x, style, f0), oracle(generator, x, style, source)
        with torch.no_grad():
            exact = generate(generator, x, style, source, None, REFERENCE)
        bucket = decoder_graph.BUCKETS.of(frames) + 8
        result, tail = padded_call(generator, x, style, source, bucket, 0.0, REFERENCE)
        dirty, _ = padded_call(generator, x, style, source, bucket, float("nan"), REFERENCE)
        assert result.shape == exact.shape == baseline.shape
        assert torch.all(tail == 0)
        assert torch.equal(result, dirty), "what lies behind the end changed the result"
        errors.append([relative_rms(value, expected) for value in (baseline, exact, result)])
    eager, exact, result = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert exact <= max(1.25 * eager, 2**-23) and result <= max(1.25 * eager, 2**-23), errors
    assert torch.tensor(errors).max() < 1e-5


@pytest.mark.slow
def test_a_padded_bucket_through_the_kernels(generator, request):
    x, style, f0 = inputs(1, 3)
    source, run = source_of(generator, f0), Run("interpreter", request.node.nodeid)
    error_of_eager = relative_rms(upstream(generator, x, style, f0), oracle(generator, x, style, source))
    result, tail = padded_call(generator, x, style, source, 8, float("nan"), run)
    calls = TALLIES.of(run.receipt).calls
    assert relative_rms(result, oracle(generator, x, style, source, run)) <= 2 * error_of_eager
    assert torch.all(tail == 0)
    assert calls == 2 + 3 + 4 + 6 * 12 and not TALLIES.of(run.receipt).fallbacks


def test_rows_of_mixed_lengths_equal_each_row_alone(generator):
    lengths = (9, 2, 16, 5)
    x, style, f0 = inputs(4, 16)
    source, per_frame = source_of(generator, f0), samples_per_frame(generator)
    with torch.no_grad():
        together = generate(generator, x, style, source, torch.tensor(lengths), REFERENCE)
        for row, length in enumerate(lengths):
            one = slice(row, row + 1)
            heard = source[one, : length * per_frame]
            alone = generate(generator, x[one, :, :length], style[one], heard, None, REFERENCE)
            assert relative_rms(together[one, :, : length * per_frame], alone.double()) < CLOSE
            assert torch.all(together[row, :, length * per_frame :] == 0)


def test_the_whole_decoder_padded_and_mixed(decoder):
    per_frame = 2 * samples_per_frame(decoder.generator)
    asr, f0, energy, style = torch.randn(2, 512, 7), torch.rand(2, 14) * 200, torch.randn(2, 14), torch.randn(2, STYLE)
    lengths = (7, 3)
    source = source_of(decoder.generator, f0)
    with torch.no_grad():
        baseline = upstream(decoder, asr, f0, energy, style)
        exact = decode(decoder, asr, f0, energy, style, source, None, REFERENCE)
        assert relative_rms(exact, baseline.double()) < CLOSE
        mixed = decode(
            decoder, padded(asr, 8, 1e9), padded(f0, 16, 1e9), padded(energy, 16, 1e9), style,
            padded(source, 8 * per_frame, 1e9), torch.tensor(lengths), REFERENCE,
        )  # fmt: skip
        assert relative_rms(mixed[0, 0, : 7 * per_frame], baseline[0, 0].double()) < CLOSE
        alone = decode(
            decoder, asr[1:, :, :3], f0[1:, :6], energy[1:, :6], style[1:], source[1:, : 3 * per_frame], None, REFERENCE
        )
        assert relative_rms(mixed[1, 0, : 3 * per_frame], alone[0, 0].double()) < CLOSE
        assert torch.all(mixed[1, 0, 3 * per_frame :] == 0)


@pytest.fixture
def anywhere(monkeypatch):
    """Runners that take a fake arena on the CPU."""
    FakeArena.made = []
    monkeypatch.setattr(decoder_graph, "unsupported", lambda *_: None)
    return lambda **options: Runners(Run("reference", "replayed decoder"), arena=FakeArena, **options)


def test_replays_of_interleaved_lengths_sound_as_upstream(generator, anywhere):
    graphs = anywhere(capture="first_use")
    for frames in (12, 3, 16, 2, 9):
        x, style, f0 = inputs(2, frames)
        baseline = upstream(generator, x, style, f0)
        replayed = upstream(lambda *given: graphs.generator(generator, *given), x, style, f0)
        assert replayed.shape == baseline.shape and relative_rms(replayed, baseline.double()) < CLOSE
    (runner,) = runners(generator)
    assert (runner.statistics.captures, runner.statistics.replays) == (2, 5)


def test_the_decoder_replays_and_takes_one_style_for_all_rows(decoder, anywhere):
    graphs = anywhere()
    asr, f0, energy, style = torch.randn(2, 512, 5), torch.rand(2, 10) * 200, torch.randn(2, 10), torch.randn(1, STYLE)
    state = torch.get_rng_state()
    assert "no graph of 2 rows × 8" in graphs.decoder(decoder, asr, f0, energy, style)
    assert torch.equal(torch.get_rng_state(), state), "noise was drawn for a call that upstream then runs"
    baseline = upstream(decoder, asr, f0, energy, style)
    with capturing():
        replayed = upstream(lambda *given: graphs.decoder(decoder, *given), asr, f0, energy, style)
    assert relative_rms(replayed, baseline.double()) < CLOSE
    mixed = upstream(lambda *given: graphs.decoder(decoder, *given, lengths=[5, 2]), asr, f0, energy, style)
    assert relative_rms(mixed[0], baseline[0].double()) < CLOSE
    assert torch.all(mixed[1, 0, 4 * samples_per_frame(decoder.generator) :] == 0)


def test_one_frame_is_left_to_upstream(generator, anywhere):
    x, style, f0 = inputs(1, 1)
    assert "outside 2 to 2048" in anywhere(capture="first_use").generator(generator, x, style, f0)


def test_what_runs_upstreams_code_and_why(istftnet, generator):
    run, arguments = Run("triton", "x"), inputs(1, 4)
    assert "disable_complex=True" in unsupported(istftnet.Generator(STYLE, **ISTFTNET, disable_complex=True), run)
    assert "need a CUDA GPU" in unsupported(generator, run, *arguments)
    graphs = Runners(Run("reference", "refused decoder"))
    reason = graphs.generator(generator, *arguments)
    assert dict(TALLIES.of("refused decoder").fallbacks) == {reason: 1}


@torch.no_grad()
def test_parts_that_are_not_upstreams_are_refused_by_name(istftnet, decoder):
    assert decoder_graph.foreign_part(decoder) is None
    hook = decoder.generator.ups[1].register_forward_hook(lambda *_: None)
    assert decoder_graph.foreign_part(decoder) == "generator.ups.1 has a forward hook, which a graph would not run"
    hook.remove()
    plain = decoder.encode.__class__
    decoder.encode.__class__ = type("Louder", (plain,), {"__module__": "elsewhere"})
    assert decoder_graph.foreign_part(decoder) == "encode is elsewhere.Louder, whose code a graph would not run"
    decoder.encode.__class__ = plain
    decoder.encode.forward = lambda x, s: x
    assert decoder_graph.foreign_part(decoder) == "encode.forward was replaced on the instance"
    del decoder.encode.forward
    decoder.generator.m_source.forward = decoder.generator.m_source.forward
    with apply_patches(decoder, policy="all", backend="reference") as patched:
        assert any(receipt.status == "applied" for receipt in patched.receipts)
        assert decoder_graph.foreign_part(decoder) is None, "voxfuse's own patches of an instance, and the source"
    decoder.decode[2].actv = torch.nn.SiLU()
    assert decoder_graph.foreign_part(decoder) == "decode.2: the activation is SiLU, expected LeakyReLU"


@torch.no_grad()
def test_a_part_that_becomes_foreign_after_the_capture_runs_upstreams_code(decoder, anywhere):
    graphs = anywhere(capture="first_use")
    inputs = torch.randn(1, 512, 5), torch.rand(1, 10) * 200, torch.randn(1, 10), torch.randn(1, STYLE)
    assert isinstance(graphs.decoder(decoder, *inputs), torch.Tensor)
    plain, decoder.encode.actv = decoder.encode.actv, torch.nn.SiLU()
    assert graphs.decoder(decoder, *inputs) == "encode: the activation is SiLU, expected LeakyReLU"
    decoder.encode.actv = plain
    assert isinstance(graphs.decoder(decoder, *inputs), torch.Tensor)
