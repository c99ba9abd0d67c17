"""The run directory: what was spoken, on disk as it is measured, so that an interrupted gate keeps it and resumes, and
so that speaking and scoring can happen on two machines.

    run.json            what the run is: protocol with hash, stack, weights, fusions, backend, environment
    texts.jsonl         the texts, in order
    utterances.jsonl    one line per (utterance, repetition, arm)
    audio/SHA256.flac   every distinct audio, 24 bit; named by the hash of its float32 samples
    timings.jsonl       timed pairs of blocks (GPU)
    memory.jsonl        peak memory of each arm in a process of its own (GPU)
    receipts.jsonl      the patch set's receipts, with the calls of each pair
    transcripts.jsonl   what each ASR heard, by audio hash
    verdict.json        the verdict

Lines are appended with flush and fsync. A torn last line is dropped; a later line about the same thing replaces an
earlier one. Figures that compare samples are computed from the float samples before FLAC rounds them.
"""

from __future__ import annotations

import hashlib
import operator
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from voxfuse.e2e.fidelity import audio_sha256
from voxfuse.e2e.protocol import Protocol, declare
from voxfuse.e2e.stack import Text
from voxfuse.e2e.wer import missing_package
from voxfuse.records import SCHEMA_VERSION, ArmUtterance, Block, Document, Environment, Receipt, Record, to_json

ArmName = Literal["baseline", "patched"]
ARMS: tuple[ArmName, ArmName] = ("baseline", "patched")
RowT = TypeVar("RowT", bound=Record)
# What must agree for a run to be resumed.
IDENTITY = (
    *("protocol_sha256", "stack", "stack_version", "weights", "device", "backend", "fusions", "texts_sha256"),
    *("environment.torch", "environment.triton", "environment.commit", "environment.voxfuse", "environment.gpu"),
)


class RunMismatch(RuntimeError):
    """A run directory holds another run than the one asked for, or none; the message says what differs."""


class RunHeader(Document, frozen=True, kw_only=True, tag="gate-run"):
    """run.json. ``protocol`` is the protocol's content as declared; ``sample_rate`` in Hz; ``unintelligible`` says why
    no words can be heard, where that is so."""

    protocol: dict[str, Any]
    protocol_sha256: str
    stack: str
    stack_version: str
    weights: str
    sample_rate: int
    device: str
    backend: str
    fusions: tuple[str, ...]
    texts_sha256: str
    environment: Environment
    workload: dict[str, int | float | str | bool | None]
    created_at: str
    unintelligible: str | None = None


class Spoken(Record, frozen=True, kw_only=True):
    """utterances.jsonl. The patched arm's row carries the comparison with the untouched arm's samples: None where they
    are identical or cannot be compared."""

    id: str
    repetition: int
    arm: ArmName
    seed: int
    output: ArmUtterance
    snr_db: float | None = None
    log_spectrum_l1: float | None = None


class PeakMemory(Record, frozen=True, kw_only=True):
    """memory.jsonl: ``torch.cuda.max_memory_allocated`` of one arm in its own process."""

    arm: ArmName
    peak_bytes: int


class Transcript(Record, frozen=True, kw_only=True):
    """transcripts.jsonl. ``text`` None: the audio could not be read, ``failure`` says why."""

    asr: str
    audio_sha256: str
    text: str | None
    failure: str | None = None


Pair = tuple[Spoken, Spoken]


class RunDirectory:
    """One run on disk; ``create`` or ``open`` makes one."""

    def __init__(self, path: Path, header: RunHeader, texts: Sequence[Text]) -> None:
        self.path = path
        self.header = header
        self.texts = tuple(texts)
        self.protocol: Protocol = declare(header.protocol).protocol

    @classmethod
    def create(cls, path: Path, header: RunHeader, texts: Sequence[Text]) -> RunDirectory:
        """Start a run, or resume the one that is there.

        Raises RunMismatch where the folder holds another run (protocol, stack, weights, fusions, ...).
        """
        if (path / "run.json").exists():
            there = cls.open(path)
            differing = [
                f"{name} is {_field(there.header, name)!r} there, {_field(header, name)!r} here"
                for name in IDENTITY
                if _field(there.header, name) != _field(header, name)
            ]
            if differing:
                raise RunMismatch(
                    f"{path} holds another run: {'; '.join(differing)}. Choose another --out, or remove that folder"
                )
            return there
        (path / "audio").mkdir(parents=True, exist_ok=True)
        run = cls(path, header, texts)
        _replace(path / "texts.jsonl", b"".join(msgspec.json.encode(text) + b"\n" for text in texts))
        _replace(path / "run.json", to_json(header))
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The run in a folder. Raises RunMismatch where there is none, or one that was tampered with or torn."""
        try:
            header = msgspec.json.decode((path / "run.json").read_bytes(), type=RunHeader)
        except FileNotFoundError:
            raise RunMismatch(f"{path} holds no run (no run.json): speak one with --generate-only first") from None
        except msgspec.DecodeError as error:
            raise RunMismatch(f"{path / 'run.json'}: not a gate run: {error}") from error
        if header.schema != SCHEMA_VERSION:
            raise RunMismatch(f"{path}: schema version {header.schema}, this voxfuse reads {SCHEMA_VERSION}")
        try:
            sha256 = declare(header.protocol).sha256
        except ValueError as error:
            raise RunMismatch(f"{path / 'run.json'}: {error}") from error
        if sha256 != header.protocol_sha256:
            raise RunMismatch(f"{path / 'run.json'}: the protocol's content does not have the hash beside it")
        texts = _rows(path / "texts.jsonl", Text)
        if texts_sha256(texts) != header.texts_sha256:
            raise RunMismatch(f"{path / 'texts.jsonl'}: the texts do not have the hash in run.json")
        return cls(path, header, texts)

    def pairs(self) -> dict[tuple[str, int], Pair]:
        """Every (utterance, repetition) spoken in both arms: baseline row, patched row; the latest of each."""
        arms: dict[tuple[str, int], dict[str, Spoken]] = {}
        for row in _rows(self.path / "utterances.jsonl", Spoken):
            arms.setdefault((row.id, row.repetition), {})[row.arm] = row
        return {key: (rows["baseline"], rows["patched"]) for key, rows in arms.items() if len(rows) == len(ARMS)}

    def blocks(self) -> tuple[Block, ...]:
        """The timed pairs of blocks."""
        return _rows(self.path / "timings.jsonl", Block)

    def peak_memory(self) -> dict[ArmName, int]:
        """Peak bytes per arm, as far as measured."""
        return {row.arm: row.peak_bytes for row in _rows(self.path / "memory.jsonl", PeakMemory)}

    def receipts(self) -> tuple[Receipt, ...]:
        """One receipt per fusion and target; calls and fallbacks are summed over the pairs spoken."""
        merged: dict[tuple[str, str], Receipt] = {}
        for row in _rows(self.path / "receipts.jsonl", Receipt):
            key = (row.fusion, row.target)
            if key in merged:
                before = merged[key]
                fallbacks = {
                    reason: before.fallbacks.get(reason, 0) + row.fallbacks.get(reason, 0)
                    for reason in (*before.fallbacks, *row.fallbacks)
                }
                row = msgspec.structs.replace(row, calls=before.calls + row.calls, fallbacks=fallbacks)
            merged[key] = row
        return tuple(merged.values())

    def transcripts(self, asr: str) -> dict[str, Transcript]:
        """What that ASR heard so far, by audio hash."""
        rows = _rows(self.path / "transcripts.jsonl", Transcript)
        return {row.audio_sha256: row for row in rows if row.asr == asr}

    def append(self, file: str, rows: Iterable[Record]) -> None:
        """Append rows to one of the ``.jsonl`` files in one write, and wait until they are on disk."""
        path = self.path / file
        data = b"".join(to_json(row, indent=-1) for row in rows)
        with path.open("r+b" if path.exists() else "x+b") as stream:
            stream.seek(_whole_lines(path))  # over a torn last line
            stream.truncate()
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())

    def audio_path(self, sha256: str) -> Path:
        """Where the audio of that hash lies. Raises ValueError for anything but a SHA-256."""
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise ValueError(f"not an audio hash: {sha256!r}")
        return self.path / "audio" / f"{sha256}.flac"

    def put_audio(self, samples: np.ndarray) -> str:
        """Keep finite mono samples, clipped to full scale, as 24-bit FLAC; returns their hash."""
        try:
            import soundfile
        except ImportError as error:
            raise missing_package(error) from error
        sha256 = audio_sha256(samples)
        path = self.audio_path(sha256)
        if not path.exists():
            partial = path.with_suffix(".part")
            clipped = np.clip(samples, -1.0, 1.0)
            soundfile.write(partial, clipped, self.header.sample_rate, format="FLAC", subtype="PCM_24")
            partial.replace(path)
        return sha256

    def put_verdict(self, data: bytes) -> Path:
        """Write verdict.json; a score computed again replaces the one before."""
        _replace(self.path / "verdict.json", data)
        return self.path / "verdict.json"


def texts_sha256(texts: Sequence[Text]) -> str:
    """The identity of a list of texts, order included."""
    return hashlib.sha256(b"\n".join(msgspec.json.encode(text) for text in texts)).hexdigest()


def _field(header: RunHeader, name: str) -> Any:
    return operator.attrgetter(name)(header)


def _rows(path: Path, kind: type[RowT]) -> tuple[RowT, ...]:
    """The rows of a file, none where it is absent; a torn last line is dropped."""
    if not path.exists():
        return ()
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise RunMismatch(f"{path}, line {number}: not a {kind.__name__}: {error}") from error
    return tuple(rows)


def _whole_lines(path: Path) -> int:
    """How many bytes of a file are whole lines."""
    return path.read_bytes().rfind(b"\n") + 1


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
