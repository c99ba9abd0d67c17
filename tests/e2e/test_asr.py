"""The embedded transcriber on speech of the test's own: deterministic, bounded, clear about what it cannot read."""

import numpy as np
import pytest
import soundfile

from voxfuse.e2e import asr
from voxfuse.e2e.asr import AsrMissing, AudioUnreadable, WhisperTranscriber

weights = pytest.mark.weights


@pytest.fixture(scope="module")
def tiny():
    return WhisperTranscriber()


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A sentence spoken by Kokoro, as FLAC."""
    from voxfuse.e2e.stacks import driver
    from voxfuse.e2e.texts import load_texts

    stack = driver("kokoro")
    stack.load("cpu")
    text = load_texts(3)[2]
    path = tmp_path_factory.mktemp("asr") / "speech.flac"
    soundfile.write(path, stack.synthesize(text, 1).audio, stack.sample_rate, subtype="PCM_24")
    return path, text.text


@weights
@pytest.mark.slow
def test_speech_is_heard_and_heard_again_alike(tiny, speech):
    from voxfuse.e2e.wer import count_edits

    path, text = speech
    heard = tiny.transcribe(path)
    assert count_edits(text, heard).edits <= 1
    assert tiny.transcribe(path) == heard == WhisperTranscriber().transcribe(path)


@weights
def test_identity_names_what_decides_the_output(tiny):
    assert tiny.identity == WhisperTranscriber().identity
    for part in ("tiny.en", "sha256:", "float32", "2 threads", "faster-whisper", "ctranslate2"):
        assert part in tiny.identity
    assert WhisperTranscriber(cpu_threads=1).identity != tiny.identity


@weights
def test_a_folder_is_the_same_model_under_its_own_name(tiny):
    folder = asr._embedded_folder()
    other = WhisperTranscriber(str(folder))
    assert other.identity == tiny.identity.replace("tiny.en", "model", 1)


@weights
@pytest.mark.parametrize("content", [b"", b"RIFF\x24\x00\x00\x00WAVEfmt ", b"plain text, no audio at all" * 100])
def test_what_is_no_audio_is_unreadable(tiny, tmp_path, content):
    path = tmp_path / "broken.wav"
    path.write_bytes(content)
    with pytest.raises(AudioUnreadable, match=r"broken\.wav"):
        tiny.transcribe(path)


@weights
def test_audio_without_samples_or_file_is_unreadable(tiny, tmp_path):
    path = tmp_path / "empty.wav"
    soundfile.write(path, np.zeros(0, np.float32), 24_000)
    with pytest.raises(AudioUnreadable, match=r"empty\.wav"):
        tiny.transcribe(path)
    with pytest.raises(AudioUnreadable, match=r"absent\.wav"):
        tiny.transcribe(tmp_path / "absent.wav")


@weights
def test_noise_cannot_loop_for_ever(tiny, tmp_path):
    path = tmp_path / "noise.wav"
    soundfile.write(path, 0.1 * np.random.default_rng(0).standard_normal(24_000), 24_000)
    assert len(tiny.transcribe(path)) < 10 * (asr.FEWEST_TOKENS + asr.TOKENS_PER_S)


@weights
def test_a_model_that_is_nowhere_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AsrMissing, match="base"):
        WhisperTranscriber("base")
    with pytest.raises(AsrMissing, match="not a CTranslate2 Whisper model"):
        WhisperTranscriber(str(tmp_path))
    monkeypatch.setattr(asr, "EMBEDDED_PACKAGE", "no_such_package")
    with pytest.raises(AsrMissing, match=r"voxfuse\[gate\]"):
        WhisperTranscriber()


def test_without_faster_whisper_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faster_whisper", None)
    with pytest.raises(ImportError, match=r"faster_whisper.*voxfuse\[gate\]"):
        WhisperTranscriber()
