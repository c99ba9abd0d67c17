"""The Kokoro driver on real weights."""

import json
import sys
import time

import numpy as np
import pytest
import torch

from voxfuse.e2e.stack import Text
from voxfuse.e2e.stacks import driver
from voxfuse.e2e.stacks.kokoro import KokoroStack, phonemize, verify
from voxfuse.e2e.texts import load_texts
from voxfuse.e2e.weights import kokoro
from voxfuse.e2e.weights.cache import WeightsCorrupt

SAMPLES_PER_FRAME = 600  # 24 kHz, 40 frames a second
HELLO = Text(id="hello", text="Hello there.", phonemes="həlˈO ðˈɛɹ.")

# Without weights


def test_unknown_stack_lists_the_known():
    with pytest.raises(ValueError, match=r"no driver for the stack 'kokorro'.*kokoro"):
        driver("kokorro")


def test_driver_loads_nothing_yet():
    stack = driver("kokoro", voice="jf_alpha")
    assert (stack.name, stack.distribution, stack.sample_rate) == ("kokoro", "kokoro", 24_000)
    assert stack.weights == ""
    with pytest.raises(RuntimeError, match="call load"):
        _ = stack.model


@pytest.mark.parametrize("options", [{"speed": 0}, {"speed": -1}, {"speed": float("nan")}, {"voice": "../kumo"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=r"speed must be a positive number|voice must be a name"):
        KokoroStack(**options)


@pytest.mark.parametrize(
    ("loaded", "problem"),
    [
        ({"a.weight": 1.0, "a.bias": 0.0}, "1 tensors are absent from the checkpoint, such as a.bias"),
        ({}, "1 tensors are unknown to the model but in the checkpoint, such as a.weight"),
        ({"a.weight": 2.0}, "1 tensors are unlike the checkpoint, such as a.weight"),
    ],
)
def test_a_half_loaded_model_is_refused(loaded, problem):
    stored = {"a.weight": torch.tensor(1.0)}
    with pytest.raises(WeightsCorrupt, match=problem):
        verify({name: torch.tensor(value) for name, value in loaded.items()}, stored)


def test_untrained_affine_and_position_ids_may_differ():
    stored = {"a.weight": torch.tensor(1.0), "bert.embeddings.position_ids": torch.arange(3)}
    verify({"a.weight": torch.tensor(1.0), "b.norm.weight": torch.ones(2), "b.norm.bias": torch.zeros(2)}, stored)


def test_free_text_without_a_g2p_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "hibari", None)
    with pytest.raises(ImportError, match="pip install hibari-tts"):
        phonemize("Hello there.")


def test_free_text_is_phonemized_sentence_by_sentence():
    pytest.importorskip("hibari")
    assert phonemize("Hello there. Good morning.") == "həlˈO ðˈɛɹ. ɡˈʊd mˈɔɹnɪŋ."


# With weights

weights = pytest.mark.weights
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def stack():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    stack = KokoroStack()
    stack.load("cpu")
    yield stack
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hello(stack):
    """HELLO spoken with seed 0."""
    return stack.synthesize(HELLO, 0).audio


@pytest.fixture
def options(stack):
    """Sets options of the shared stack for one test."""
    before = stack.speed, stack.timed
    yield lambda **values: [setattr(stack, name, value) for name, value in values.items()]
    stack.speed, stack.timed = before


@slow
@weights
def test_a_seed_decides_the_audio_and_global_random_state_is_left_alone(stack, hello):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again, other = (stack.synthesize(HELLO, seed).audio for seed in (0, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert hello.dtype == np.float32 and hello.ndim == 1
    assert np.array_equal(hello, again)
    assert hello.shape == other.shape and not np.array_equal(hello, other)
    assert 0.05 < np.abs(hello).max() <= 1


@slow
@weights
def test_it_speaks_as_upstream_does(stack, hello):
    """KPipeline.infer of kokoro 0.9.4: model(ps, pack[len(ps) - 1], speed)."""
    styles = kokoro.find("jm_kumo").styles
    torch.manual_seed(0)
    expected = stack.model(HELLO.phonemes, styles[len(HELLO.phonemes) - 1], 1)
    assert np.array_equal(hello, expected.numpy())


@slow
@weights
def test_one_phoneme(stack):
    audio = stack.synthesize(Text(id="a", text="a", phonemes="A"), 0).audio
    assert audio.size >= 3 * SAMPLES_PER_FRAME and np.isfinite(audio).all()


@slow
@weights
def test_as_many_phonemes_as_the_model_takes(stack, options):
    options(speed=2.0)  # half the audio to generate
    phonemes = (" ".join(text.phonemes for text in load_texts(15)))[:510]
    audio = stack.synthesize(Text(id="long", text="long", phonemes=phonemes), 0).audio
    assert len(phonemes) == 510
    assert 10 < audio.size / stack.sample_rate < 30 and np.isfinite(audio).all()


@slow
@weights
def test_more_phonemes_are_refused(stack):
    with pytest.raises(ValueError, match="text long: 511 phonemes, the model takes at most 510: split it"):
        stack.synthesize(Text(id="long", text="long", phonemes="A" * 511), 0)


@slow
@weights
@pytest.mark.parametrize("phonemes", ["", "日本"])
def test_nothing_to_speak_is_refused(stack, phonemes):
    with pytest.raises(ValueError, match="text none: nothing to speak"):
        stack.synthesize(Text(id="none", text="none", phonemes=phonemes), 0)


@slow
@weights
def test_unknown_phonemes_are_left_out_with_a_warning(stack):
    with pytest.warns(UserWarning, match="text odd: not in Kokoro's alphabet, left out: 日 本"):
        audio = stack.synthesize(Text(id="odd", text="odd", phonemes="həlˈO本 ðˈɛɹ.日"), 0).audio
    assert audio.size > 0


@slow
@weights
@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_speed_divides_the_durations(stack, hello, options, speed):
    options(speed=speed)
    changed = stack.synthesize(HELLO, 0).audio
    rounding = (len(HELLO.phonemes) + 2) * SAMPLES_PER_FRAME  # each token's frames are rounded, and at least one
    assert abs(changed.size - hello.size / speed) < rounding
    assert np.isfinite(changed).all()


@slow
@weights
def test_stages_are_timed_only_when_asked(stack, hello, options):
    options(timed=True)
    start = time.perf_counter()
    timed = stack.synthesize(HELLO, 0)
    wall = time.perf_counter() - start
    assert set(timed.stages) == {"text", "decoder"}
    assert all(seconds > 0 for seconds in timed.stages.values())
    assert 0.8 * wall < sum(timed.stages.values()) <= wall
    assert np.array_equal(timed.audio, hello)
    options(timed=False)
    assert stack.synthesize(HELLO, 0).stages == {}


@slow
@weights
def test_an_exception_inside_the_model_leaves_it_usable(stack, hello, options, monkeypatch):
    options(timed=True)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(type(stack.model.decoder.generator), "forward", lambda *args: 1 / 0)
        stack.synthesize(HELLO, 0)
    assert not stack.model.decoder._forward_pre_hooks and not stack.model.decoder.generator._forward_hooks
    options(timed=False)
    assert np.array_equal(stack.synthesize(HELLO, 0).audio, hello)


@slow
@weights
def test_weights_names_checksums(stack):
    assert "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb" in stack.weights
    assert "voice jm_kumo" in stack.weights


@slow
@weights
def test_unusable_cache_folder_still_speaks(hello, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("VOXFUSE_CACHE", str(tmp_path / "file" / "cache"))
    other = KokoroStack()
    with pytest.warns(UserWarning, match="kept in memory"):
        other.load("cpu")
    assert np.array_equal(other.synthesize(HELLO, 0).audio, hello)


def write_hub_files(folder, voice, with_affine=True):
    """A folder as hexgrad/Kokoro-82M has it, whose voice is jm_kumo under another name."""
    files = kokoro.find("jm_kumo")
    folder.mkdir(parents=True)
    (folder / "voices").mkdir()
    (folder / "config.json").write_text(json.dumps(files.config))
    if with_affine:
        (folder / kokoro.CHECKPOINT).symlink_to(files.checkpoint)
    else:
        stored = torch.load(files.checkpoint, weights_only=True)
        kept = {
            part: {name: tensor for name, tensor in tensors.items() if ".norm." not in name}
            for part, tensors in stored.items()
        }
        torch.save(kept, folder / kokoro.CHECKPOINT)
    torch.save(files.styles, folder / "voices" / f"{voice}.pt")


@slow
@weights
def test_users_own_folder_without_the_untrained_affine(hello, tmp_path):
    """Upstream's checkpoint lacks the affine of AdaIN's norms, which KModel then leaves at 1 and 0."""
    write_hub_files(tmp_path / "kokoro", "am_own", with_affine=False)
    own = KokoroStack(voice="am_own")
    own.load("cpu", tmp_path / "kokoro")
    assert own.weights.startswith("kokoro/kokoro-v1_0.pth sha256:")
    assert np.array_equal(own.synthesize(HELLO, 0).audio, hello)


@slow
@weights
def test_damaged_checkpoint_of_the_user(tmp_path):
    write_hub_files(tmp_path / "kokoro", "am_own")
    checkpoint = tmp_path / "kokoro" / kokoro.CHECKPOINT
    checkpoint.unlink()
    checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(WeightsCorrupt, match=r"kokoro-v1_0\.pth is not a checkpoint of Kokoro"):
        KokoroStack(voice="am_own").load("cpu", tmp_path / "kokoro")


@weights
def test_hugging_face_cache_comes_before_the_embedded_default(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "models--hexgrad--Kokoro-82M"
    write_hub_files(repository / "snapshots" / "0123456789abcdef", "af_heart")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub = kokoro.find("af_heart")
    assert hub.source.startswith("hexgrad/Kokoro-82M (Hugging Face cache) kokoro-v1_0.pth sha256:")
    assert torch.equal(hub.styles, kokoro.find("jm_kumo").styles)
    assert "voice jm_kumo (embedded)" in kokoro.find("jm_kumo").source
