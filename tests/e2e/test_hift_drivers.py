"""The vocoder stages of CosyVoice2, CosyVoice3 and Chatterbox as drivers: weights, spectrograms, oracle, the gate."""

import json

import hift_classes
import numpy as np
import pytest
import torch

from voxfuse import apply_patches
from voxfuse.e2e import guards as judge
from voxfuse.e2e.command import speaker
from voxfuse.e2e.gate import generate
from voxfuse.e2e.protocol import declare, load_protocol
from voxfuse.e2e.score import score
from voxfuse.e2e.stack import Text, WeightsMissing
from voxfuse.e2e.stacks import _mel, driver
from voxfuse.e2e.stacks._hift import SYNTHETIC
from voxfuse.e2e.weights.cache import WeightsCorrupt
from voxfuse.records import ArmUtterance, Utterance

HELLO = Text(id="hello", text="Hello there.")


@pytest.fixture(params=hift_classes.MODULES)
def stack(request):
    hift_classes.upstream(request.param)
    return driver(request.param, width=32)


@pytest.fixture
def loaded(stack):
    stack.load("cpu")
    return stack


def test_random_weights_of_the_released_shapes(loaded):
    assert loaded.weights == "random weights (seed 0) at the released shapes" and loaded.unintelligible == SYNTHETIC
    assert loaded.sample_rate == 24_000 and [up.kernel_size[0] for up in loaded.model.ups] == [16, 11, 7]
    other = driver(loaded.name, width=32)
    other.load("cpu")
    theirs = other.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in loaded.model.state_dict().items())


def test_a_seed_means_the_same_and_leaves_no_trace(loaded):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, again = (loaded.synthesize(HELLO, seed=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(first.audio, again.audio) and first.audio.dtype == np.float32
    frames = _mel.LEAD_FRAMES + 2 * _mel.FRAMES_A_WORD
    assert first.audio.shape == (480 * frames,) and 1e-3 < first.audio.std() < 0.5 and first.stages == {}
    loaded.timed = True
    assert loaded.synthesize(HELLO, seed=3).stages["vocoder"] > 0
    if loaded.name != "cosyvoice3":  # whose noise is drawn when it is made
        assert not np.array_equal(loaded.synthesize(HELLO, seed=4).audio, first.audio)


def test_the_oracle_is_the_decoder_in_fp64_on_the_calls_own_source(loaded):
    with pytest.raises(RuntimeError, match="nothing was spoken"):
        loaded.oracle()
    audio = loaded.synthesize(HELLO, seed=3).audio
    exact = loaded.oracle()
    error = np.linalg.norm(audio - exact) / np.linalg.norm(exact)
    assert exact.dtype == np.float64 and 1e-9 < error < 1e-5
    assert loaded.model.conv_post.bias.dtype == torch.float32


def test_a_checkpoint_is_loaded_and_one_that_does_not_fit_is_refused(loaded, tmp_path, monkeypatch):
    prefix = "mel2wav." if loaded.name == "chatterbox" else "generator."
    stored = {prefix + name: tensor * 0.9 for name, tensor in loaded.model.state_dict().items()}
    other = driver(loaded.name, width=32)
    with pytest.raises(WeightsMissing, match=f"expected {loaded.name}'s release"):
        other.load("cpu", tmp_path)
    name = loaded.files[-1]
    torch.save(stored, tmp_path / name)
    monkeypatch.setattr("voxfuse.e2e.stacks._hift.KokoroStack", Speaker)
    other.load("cpu", tmp_path)
    assert other.unintelligible is None and f"{name} sha256:" in other.weights
    assert torch.equal(other.model.conv_post.bias, loaded.model.conv_post.bias * 0.9)
    assert other.synthesize(HELLO, seed=0).audio.shape == (24_000,)
    stored.popitem()
    torch.save(stored, tmp_path / name)
    with pytest.raises(WeightsCorrupt, match="is not the vocoder of"):
        other.load("cpu", tmp_path)


class Speaker:
    """Kokoro's stand-in: a second of a tone."""

    def load(self, device):
        self.device = device

    def synthesize(self, text, seed):
        from voxfuse.e2e.stack import Speech

        return Speech(np.sin(np.arange(24_000) * 0.1).astype(np.float32), {})


# --- spectrograms ----------------------------------------------------------------------------------------------------


def test_bands_are_slaneys():
    """What defines them: centres, an area of one, and widths that grow above 1 kHz."""
    bank = _mel.bank(8000.0)
    assert bank.shape == (80, 961) and bank.dtype == np.float32
    centres = bank.argmax(1) * 12.5
    assert np.allclose(centres[:3], [37.5, 75.0, 112.5], atol=13) and centres[-1] < 8000
    width_hz = 12.5 * (bank > 0).sum(1)
    assert np.allclose(bank.sum(1) * 12.5, 1, atol=0.08), "each triangle has an area of one"
    assert width_hz[-1] > 4 * width_hz[0], "linear below 1 kHz, logarithmic above"


def test_a_tone_lies_in_its_band():
    hz = 1000.0
    mel = _mel.log_mel(torch.sin(torch.arange(24_000) * 2 * torch.pi * hz / 24_000)[None], 8000.0)
    assert mel.shape == (1, 80, 50)
    corners = _mel.bank(8000.0)[mel[0, :, 25].argmax()].nonzero()[0] * 12.5
    assert corners[0] <= hz <= corners[-1]
    assert _mel.log_mel(torch.zeros(1, 4800), 8000.0).max() < -5, "silence is at the floor"


# --- the gate ---------------------------------------------------------------------------------------------------------


class NoReader:
    identity = "must not be asked"

    def transcribe(self, path):
        raise AssertionError("random weights were transcribed")


def test_the_gate_judges_fidelity_and_says_why_not_the_words(loaded, tmp_path):
    content = json.loads(json.dumps(load_protocol("smoke", sentences=2).content))
    declared = declare(content)

    def apply(left_out):
        return apply_patches(loaded.name, exclude=left_out, policy="all", backend="reference")

    texts = [HELLO, Text(id="more", text="One two three.")]
    run = generate(loaded, apply, declared, texts, tmp_path, lambda *_: None, device="cpu", backend="reference")
    verdict = score(run, NoReader(), lambda *_: None)
    found = {guard.name: guard for guard in verdict.guards}
    assert verdict.verdict == "not-judged" and verdict.asr is None
    assert (found["WER ceiling"].outcome, found["WER ceiling"].detail) == ("not-judged", SYNTHETIC)
    assert found["fidelity, worst"].outcome == found["fidelity, fp64 oracle"].outcome == "pass"
    assert found["fusions fired"].outcome == found["no fallback"].outcome == "pass"
    assert "2 pairs" in found["fidelity, fp64 oracle"].detail
    assert {"snake_conv_block"} <= set(verdict.fusions)


def outcome(base_db, patched_db, device="cuda"):
    def arm(value):
        return ArmUtterance(audio_sha256="x", audio_s=1.0, oracle_snr_db=value)

    utterance = Utterance(id="a", seed=0, reference_words=1, baseline=arm(base_db), patched=arm(patched_db))
    (guard,) = judge.oracle([utterance], device)
    return guard.outcome


def test_the_oracle_guard_refuses_what_is_less_precise():
    assert outcome(100.0, 99.0) == outcome(100.0, 130.0) == outcome(150.0, 140.0) == "pass"
    assert outcome(100.0, 97.9) == outcome(120.0, 60.0) == "fail"
    assert outcome(100.0, 96.0, "cpu") == "pass" and outcome(100.0, 87.0, "cpu") == "fail"
    assert judge.oracle([], "cuda") == []


def test_another_length_than_the_oracles_is_a_failure(loaded, tmp_path):
    class Longer(type(loaded)):
        def synthesize(self, text, seed):
            speech = super().synthesize(text, seed)
            return speech._replace(audio=np.append(speech.audio, np.float32(0)))

    stack = Longer(width=32)
    stack.load("cpu")
    declared = declare(load_protocol("smoke", sentences=1).content)

    def apply(left_out):
        return apply_patches(loaded.name, policy="all", backend="reference")

    run = generate(stack, apply, declared, [HELLO], tmp_path, lambda *_: None, device="cpu", backend="reference")
    ((baseline, patched),) = run.pairs().values()
    assert baseline.output.failure == patched.output.failure == "19201 samples, where there should be 19200"


def test_the_command_applies_what_the_vocoder_can_reach(stack, tmp_path, monkeypatch):
    """A stack's language model has fusions too, which this part of it never calls: unfired ones fail a gate."""
    asked = {}

    def apply_patches_of(name, **options):
        asked[name] = options
        raise KeyboardInterrupt

    monkeypatch.setattr("voxfuse.apply_patches", apply_patches_of)
    monkeypatch.setattr("voxfuse.e2e.command.driver", lambda _: stack)
    into = speaker(stack.name, "cpu", "smoke", 1, tmp_path, None, "reference", None, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        into(False)
    assert set(asked[stack.name]["include"]) == set(stack.fusions) and not asked[stack.name]["strict"]
