"""f0 and source of HiFT on the real classes of every stack: upstream's values from the same random numbers."""

import copy

import hift_classes
import pytest
import torch
from fake_arena import FakeArena

import voxfuse
from voxfuse.fusions import hift_source, hift_source_graph
from voxfuse.fusions.graph_runner import capturing, runners
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches import registry
from voxfuse.patches.guards import resolve

REFERENCE = Run("reference", "hift source")
ROUNDING, CLOSE = 1e-6, 1e-5  # relative RMS: of the last linear layer, and what comes of it through the exponential
KINDS = {"cosyvoice2": "SineGen2", "chatterbox": "SineGen", "cosyvoice3": "causal SineGen2"}


@pytest.fixture(params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return request.param


@pytest.fixture
def hift(stack):
    hift = hift_classes.generator(stack)
    if stack == "cosyvoice3":
        hift.f0_predictor.double()
    return hift


def mel_of(rows=2, frames=9):
    return torch.randn(rows, hift_classes.BINS, frames)


def seeded(call):
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(11)
        return call(), torch.get_rng_state()


def relative_rms(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


def fused(hift, mel, lengths=None, run=REFERENCE):
    drawn = hift_source.draw(hift, mel.shape[0], mel.shape[2], mel.device)
    f0 = hift_source.frequencies(hift.f0_predictor, mel, lengths).float()
    return hift_source.harmonic_source(hift, f0, drawn, lengths, run)


def test_each_stack_has_its_kind_of_source(hift, stack):
    assert hift_source.fault(hift) is None and hift_source.kind_of(hift.m_source.l_sin_gen) == KINDS[stack]


@pytest.mark.parametrize(("rows", "frames"), [(2, 9), (1, 1), (3, 2), (1, 17)])
def test_source_and_generator_state_are_upstreams(hift, rows, frames):
    mel = mel_of(rows, frames)
    (_, expected), state = seeded(lambda: hift.inference(mel))
    found, state_after = seeded(lambda: fused(hift, mel))
    assert torch.equal(state_after, state), "another number of random numbers was drawn"
    assert relative_rms(found, expected[:, 0]) < ROUNDING


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("frames", [1, 2, 15, 16, 17, 400])
def test_the_sines_of_a_causal_source_have_upstreams_bits(frames, held):
    """The identity: one sine a frame is what upstream makes for all its samples, whatever its random phases."""
    hift_classes.upstream("cosyvoice3")
    sines = hift_classes.generator("cosyvoice3").m_source.l_sin_gen
    scale = int(sines.upsample_scale)
    f0 = 80 + 300 * torch.rand(2, frames if held else frames * scale)
    f0[:, 3::7] = 0
    at_samples = f0.repeat_interleave(scale, 1) if held else f0
    middle = torch.stack([at_samples[:, (scale - 1) // 2 :: scale], at_samples[:, scale // 2 :: scale]])
    found = hift_source.frame_sines(sines, middle)
    for phases in (sines.rand_ini, torch.rand(1, 9)):
        sines.rand_ini = phases
        expected = sines._f02sine(at_samples.unsqueeze(-1) * torch.arange(1.0, 10.0))
        assert torch.equal(found.repeat_interleave(scale, 1), expected)


def test_through_the_kernels(hift, stack):
    run = Run("interpreter", f"{stack} source kernels")
    mel = mel_of(1, 5)
    (_, expected), _ = seeded(lambda: hift.inference(mel))
    found, _ = seeded(lambda: fused(hift, mel, run=run))
    assert relative_rms(found, expected[:, 0]) < 1e-4
    assert (TALLIES.of(run.receipt).calls, dict(TALLIES.of(run.receipt).fallbacks)) == (1, {})


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_what_lies_behind_a_rows_end_is_not_heard(hift, stack, backend):
    run = Run(backend, f"{stack} source {backend} lengths")
    mel, lengths = mel_of(3, 9), [9, 2, 5]
    drawn = hift_source.draw(hift, 3, 9, mel.device)
    per_frame = int(hift.f0_upsamp.scale_factor)
    dirty = mel.clone()
    for row, length in enumerate(lengths):
        dirty[row, :, length:] = float("nan")
    with torch.no_grad():
        f0 = hift_source.frequencies(hift.f0_predictor, dirty, torch.tensor(lengths)).float()
        together = hift_source.harmonic_source(hift, f0, drawn, torch.tensor(lengths), run)
        for row, length in enumerate(lengths):
            one, samples = slice(row, row + 1), length * per_frame
            own = hift_source.frequencies(hift.f0_predictor, mel[one, :, :length], None).float()
            parts = [part[one, :, :samples] if part.dim() == 3 else part[one] for part in drawn]
            alone = hift_source.harmonic_source(hift, own, parts, None, run)
            assert torch.allclose(together[one, :samples], alone, atol=2e-6)
            assert torch.all(together[row, samples:] == 0)


def test_what_is_not_upstreams_is_named(hift):
    def broken(change):
        changed = copy.deepcopy(hift)
        change(changed)
        return hift_source_graph.foreign_part(changed)

    assert broken(lambda m: None) is None
    assert "ELU" in broken(lambda m: setattr(m.f0_predictor.condnet[1], "alpha", 0.5))
    assert "expected ELU" in broken(lambda m: m.f0_predictor.condnet.__setitem__(1, torch.nn.ReLU()))
    assert "Linear with bias" in broken(lambda m: setattr(m.m_source, "l_linear", torch.nn.Linear(9, 1, bias=False)))
    assert "forward hook" in broken(lambda m: m.f0_predictor.register_forward_hook(lambda *_: None))
    assert "held" in broken(lambda m: setattr(m, "f0_upsamp", torch.nn.Upsample(scale_factor=2)))


# --- the source by itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
@pytest.mark.parametrize("held", [True, False])
def test_the_module_by_the_stacks_name(stack, hift, backend, held):
    if stack == "chatterbox":
        pytest.skip("a stepped source has no patch of its own")
    scale = int(hift.f0_upsamp.scale_factor)
    f0 = 80 + 200 * torch.rand(2, 6 if held else 6 * scale)
    f0[:, 2::5] = 0
    x = (f0.repeat_interleave(scale, 1) if held else f0).unsqueeze(-1)
    expected, state = seeded(lambda: hift.m_source(x))
    with voxfuse.apply_patches(stack, include=["sine_source"], policy="all", backend=backend) as patches:
        found, state_after = seeded(lambda: hift.m_source(x))
        (receipt,) = (receipt for receipt in patches.receipts if receipt.fusion == "sine_source")
    assert torch.equal(state_after, state) and (receipt.calls, dict(receipt.fallbacks)) == (1, {})
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
    assert found[0].shape == expected[0].shape
    if backend == "reference":
        assert relative_rms(found[0], expected[0]) < ROUNDING
    assert relative_rms(found[0], expected[0]) < 1e-3


# --- inference from graphs -----------------------------------------------------------------------------------------


@pytest.fixture
def graphs(stack, monkeypatch, request):
    """``inference`` replaced with a fake arena on the CPU; upstream's, and the receipt's tally."""
    FakeArena.made = []
    monkeypatch.setattr(
        hift_source_graph, "unsupported", lambda hift, run, mel, ahead: hift_source_graph.unsuited(hift, mel, ahead)
    )
    real = hift_source_graph.SourceRunners
    monkeypatch.setattr(
        hift_source_graph, "SourceRunners", lambda *args, **options: real(*args, arena=FakeArena, **options)
    )
    patch = registry.patches_of(stack).patches[0]
    assert patch.fusion is hift_source_graph.HIFT_SOURCE_GRAPH
    cls = resolve(patch.target).owner
    original, run = cls.inference, Run("reference", request.node.nodeid)
    monkeypatch.setattr(cls, "inference", patch.build(original, run))
    return original, TALLIES.of(run.receipt)


def test_inference_replayed_at_interleaved_lengths_is_upstreams(hift, graphs):
    original, tally = graphs
    with capturing():
        for frames in (12, 3, 16, 1, 9):
            mel = mel_of(2, frames)
            (audio, source), state = seeded(lambda: hift.inference(mel))  # noqa: B023
            (expected, heard), expected_state = seeded(lambda: original(hift, mel))  # noqa: B023
            assert torch.equal(state, expected_state) and relative_rms(audio, expected) < CLOSE
            assert relative_rms(source, heard) < ROUNDING
    (runner,) = runners(hift)
    assert (runner.statistics.captures, runner.statistics.replays) == (2, 5) and not tally.fallbacks


def test_a_source_that_continues_another(hift, stack, graphs):
    original, _ = graphs
    if stack == "cosyvoice3":
        pytest.skip("no cache_source there")
    mel, cache = mel_of(1, 8), 0.1 * torch.randn(1, 1, 100)
    with capturing():
        (audio, source), _ = seeded(lambda: hift.inference(mel, cache))
        (expected, heard), _ = seeded(lambda: original(hift, mel, cache))
        assert relative_rms(source, heard) < ROUNDING and torch.equal(source[:, :, :100], cache)
        assert relative_rms(audio, expected) < CLOSE
        (audio, _), _ = seeded(lambda: hift.inference(speech_feat=mel, cache_source=cache))
        assert relative_rms(audio, expected) < CLOSE


def test_a_causal_source_where_more_will_follow(graphs, stack, hift):
    if stack != "cosyvoice3":
        pytest.skip("not causal")
    original, tally = graphs
    with capturing():
        for frames in (12, 9, 15):
            for finalize in (False, True):
                mel = mel_of(2, frames)
                audio, source = hift.inference(mel, finalize=finalize)
                expected, heard = original(hift, mel, finalize=finalize)
                assert source.shape == heard.shape and relative_rms(source, heard) < ROUNDING
                assert audio.shape == expected.shape and relative_rms(audio, expected) < CLOSE
    assert not tally.fallbacks


def test_a_causal_predictor_is_cast_as_upstream_does(graphs, stack, hift):
    if stack != "cosyvoice3":
        pytest.skip("not causal")
    hift.f0_predictor.float()
    with capturing():
        hift.inference(mel_of())
    assert hift.f0_predictor.classifier.weight.dtype == torch.float64


def test_without_a_graph_nothing_is_drawn_twice(hift, graphs):
    original, tally = graphs
    mel = mel_of(1, 5)
    (audio, _), state = seeded(lambda: hift.inference(mel))
    (expected, _), expected_state = seeded(lambda: original(hift, mel))
    assert torch.equal(audio, expected) and torch.equal(state, expected_state)
    assert [*tally.fallbacks] == ["no graph of 1 rows × 8: warm up inside voxfuse.capturing()"]


def test_new_weights_of_the_predictor_are_captured_again_and_others_are_not(hift, graphs):
    original, _ = graphs
    mel = mel_of(1, 5)
    with capturing():
        seeded(lambda: hift.inference(mel))
        (runner,) = runners(hift)
        with torch.no_grad():
            hift.conv_pre.parametrizations.weight.original0.mul_(2)
        seeded(lambda: hift.inference(mel))
        assert runner.statistics.captures == 1
        with torch.no_grad():
            hift.f0_predictor.condnet[2].parametrizations.weight.original0.mul_(2)
        (audio, _), _ = seeded(lambda: hift.inference(mel))
    (expected, _), _ = seeded(lambda: original(hift, mel))
    assert relative_rms(audio, expected) < CLOSE and runner.statistics.recaptures == 1


def test_calls_that_no_graph_takes(hift, graphs):
    _, tally = graphs
    mel = mel_of(1, 4)
    with capturing():
        hift.train()
        hift.inference(mel)
        hift.eval()
        with pytest.raises(RuntimeError):
            hift.inference(mel[:, :7])
        with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
            hift.inference(mel)  # of bf16, torch.istft refuses the parts
    reasons = [*tally.fallbacks]
    for reason, word in zip(reasons, ("training", "mel must be", "autocast"), strict=True):
        assert word in reason
