"""Protocols: everything that a gate decides by, declared in a file before the run, with its hash in the verdict."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from voxfuse.records import Record

SHIPPED = ("smoke", "full")
LARGEST_BYTES = 1 << 20

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Some = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class FidelityRules(Record, frozen=True, kw_only=True):
    """Tier 0. Bounds on samples that are not identical, for the median and for every single utterance; one beyond a
    worst-case bound ends the run early where ``stop_early`` is set, since the verdict cannot change any more."""

    snr_db_median: float
    snr_db_worst: float
    log_spectrum_l1_median: Positive
    log_spectrum_l1_worst: Positive
    stop_early: bool


class WerRules(Record, frozen=True, kw_only=True):
    """Tier 2. ``margin_pp`` and ``ceiling_pp`` in percentage points; the rest as in ``statistics``.

    ``extension_repetitions`` more repetitions are spoken, once, where the first look is inconclusive.
    """

    margin_pp: Positive
    margin_relative: Share
    ceiling_pp: Positive
    confidence: Annotated[float, msgspec.Meta(gt=0.5, lt=1)]
    resamples: Count
    exact_below: Some
    edits_per_change: Annotated[float, msgspec.Meta(ge=1)]
    extension_repetitions: Some


class RowRules(Record, frozen=True, kw_only=True):
    """When one output is a fault. An output is expected to last ``lead_s + seconds_per_word · words``, or as long as
    the untouched arm's; silence is an RMS below ``silence_rms`` of full scale; clipping is a share of samples."""

    runaway_ratio: Annotated[float, msgspec.Meta(gt=1)]
    lead_s: Positive
    seconds_per_word: Positive
    silence_rms: Positive
    clipped_share: Share


class ThroughputRules(Record, frozen=True, kw_only=True):
    """Timed pairs of blocks, on a GPU only. Fewer than ``claim_pairs`` carry no 95 % interval: inconclusive.

    Any other timed or memory figure may regress by max(``tolerance``, 2 × its A/A noise); noise above ``noise_cap``
    makes the verdict inconclusive. Peak memory may also rise by ``memory_allowance_bytes``, whatever share that is.
    """

    block_sentences: Count
    aa_pairs: Count
    pairs: Count
    claim_pairs: Count
    leave_one_out_pairs: Some
    memory_sentences: Count
    tolerance: Share
    noise_cap: Share
    memory_allowance_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Protocol(Record, frozen=True, kw_only=True):
    """One protocol file. ``comment`` says why each bound is what it is."""

    name: str
    version: Count
    comment: dict[str, str]
    sentences: Count
    repetitions: Count
    seed: Some
    fidelity: FidelityRules
    wer: WerRules
    rows: RowRules
    throughput: ThroughputRules


class Declared(NamedTuple):
    """A protocol as data, with the hash of what was declared."""

    protocol: Protocol
    content: dict[str, Any]
    sha256: str


def load_protocol(name: str, sentences: int | None = None) -> Declared:
    """A shipped protocol by name, or one from a ``.json`` file.

    ``sentences`` overrides how many are spoken; the override is part of the name and of the hash, so that a shortened
    protocol is never taken for the declared one.

    Raises ValueError, saying what was expected, for an unknown name or a file that is not a protocol.
    """
    if name in SHIPPED:
        data = importlib.resources.files("voxfuse.e2e").joinpath("protocols", f"{name}.json").read_bytes()
    else:
        path = Path(name)
        if path.suffix != ".json" or not path.is_file():
            raise ValueError(f"no protocol {name!r}: expected one of {', '.join(SHIPPED)}, or the path of a .json file")
        if path.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"{name}: a protocol of {path.stat().st_size} bytes; at most {LARGEST_BYTES} are read")
        data = path.read_bytes()
    try:
        content = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{name}: not JSON: {error}") from error
    if sentences is not None and isinstance(content, dict) and content.get("sentences") != sentences:
        content = {**content, "name": f"{content.get('name')}[sentences={sentences}]", "sentences": sentences}
    return declare(content)


def declare(content: Any) -> Declared:
    """Check a protocol's content and hash it (canonical JSON: sorted keys, no spaces). Raises ValueError."""
    try:
        protocol = msgspec.convert(content, Protocol)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a protocol: {error}") from error
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return Declared(protocol, content, hashlib.sha256(canonical.encode()).hexdigest())


def seed_of(protocol: Protocol, utterance: str, repetition: int) -> int:
    """The seed of one utterance and repetition, the same in both arms: 31 bits of a SHA-256."""
    digest = hashlib.sha256(f"{protocol.seed}:{utterance}:{repetition}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
