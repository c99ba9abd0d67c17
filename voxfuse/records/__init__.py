"""The records that pass between the rooms: hotspot, fusion, receipt and verdicts, as data.

Every record is JSON with a schema version. A verdict carries the raw samples that it was computed from, so that it
can be recomputed; ``json_schema`` gives the JSON Schema (draft 2020-12) of a record type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from voxfuse.records.base import SCHEMA_VERSION, Contract, Document, Environment, Record, TensorSignature
from voxfuse.records.profile import (
    DeviceTime,
    Fusion,
    FusionPattern,
    Hotspot,
    HotspotReport,
    ProcessProfile,
    StageTime,
)

__all__ = [
    "SCHEMA_VERSION",
    "AnyDocument",
    "Arm",
    "ArmUtterance",
    "Backend",
    "Block",
    "Case",
    "Comparison",
    "Contract",
    "DeviceTime",
    "Document",
    "Environment",
    "Fusion",
    "FusionPattern",
    "GateOutcome",
    "GateVerdict",
    "Guard",
    "Hotspot",
    "HotspotReport",
    "Metric",
    "MicroVerdict",
    "ProcessProfile",
    "Ratio",
    "Receipt",
    "Record",
    "StageTime",
    "Status",
    "TensorSignature",
    "Utterance",
    "from_json",
    "json_schema",
    "read",
    "to_json",
    "write",
]

Backend = Literal["triton", "interpreter", "reference"]
Status = Literal["applied", "pending", "skipped", "deferred", "reverted"]
Comparison = Literal["win", "loss", "neutral"]
GateOutcome = Literal["pass", "fail", "inconclusive", "not-judged"]


class Receipt(Document, frozen=True, kw_only=True, tag="receipt"):
    """What became of one fusion on one target.

    ``calls`` counts fused calls, graph replays included; ``fallbacks`` counts, per reason, the calls that ran the
    upstream chain instead.
    """

    fusion: str
    stack: str
    target: str
    count: int
    status: Status
    reason: str | None = None
    backend: Backend | None = None
    calls: int = 0
    fallbacks: dict[str, int] = {}
    process_id: int
    versions: dict[str, str] = {}


class Case(Record, frozen=True, kw_only=True):
    """One shape at which a fusion is judged; ``parameters`` are the scalar arguments."""

    name: str
    stack: str
    tensors: dict[str, TensorSignature]
    parameters: dict[str, int | float | str | bool] = {}


class Arm(Record, frozen=True, kw_only=True):
    """One contender of a micro verdict.

    ``gpu_us`` are per-pair samples, in the same order in every arm of the verdict (graph replay); ``host_us`` is the
    eager host cost of one call; ``error_fp64`` is the relative RMS error against the fp64 oracle. ``absent`` says why
    an arm could not run, and then nothing else is set.
    """

    name: str
    gpu_us: tuple[float, ...] = ()
    host_us: float | None = None
    launches: int | None = None
    peak_bytes: int | None = None
    error_fp64: float | None = None
    absent: str | None = None


class Ratio(Record, frozen=True, kw_only=True):
    """Median of paired ratios baseline / voxfuse (above 1 means that voxfuse is faster) with its 95 % interval."""

    baseline: str
    median: float
    low: float
    high: float
    verdict: Comparison


class MicroVerdict(Document, frozen=True, kw_only=True, tag="micro-verdict"):
    """One fusion at one shape on one GPU against its baselines. ``wrong`` set means: no speed is claimed.

    ``aa_half_width`` is the half-width of the A/A interval, as a ratio; ``win_bar`` = max(0.03, 2 × that).
    ``ceilings`` are measured in the same run: ``copy_bytes_per_s`` at the case's footprint, ``launch_floor_us``, the
    peaks of a large copy and of matmuls, and ``flop_per_s``, the peak of the precision that ``flop`` counts in.
    ``bytes_moved`` is the compulsory traffic (each input read once, each output written once), ``flop`` the arithmetic
    that could bound the call (0: none); ``speed_of_light`` is the fraction of max(bytes / copy bandwidth, flop / peak,
    launch floor) reached.
    """

    fusion: str
    case: Case
    environment: Environment
    arms: tuple[Arm, ...]
    ratios: tuple[Ratio, ...]
    aa_half_width: float
    win_bar: float
    controls: dict[str, float]
    ceilings: dict[str, float]
    bytes_moved: int
    flop: int = 0
    speed_of_light: float | None
    wrong: str | None = None
    measured_at: str


class Metric(Record, frozen=True, kw_only=True):
    """One figure of a gate, for both arms; ``low`` and ``high`` bound ``delta`` (95 %) where an interval exists.

    ``not_judged`` says why the figure is missing or not judged.
    """

    name: str
    unit: str
    baseline: float | None
    patched: float | None
    delta: float | None = None
    low: float | None = None
    high: float | None = None
    not_judged: str | None = None


class Guard(Record, frozen=True, kw_only=True):
    """A condition declared before the run. ``outcome`` is ``pass``, ``fail``, ``inconclusive`` or ``not-judged``."""

    name: str
    value: float | None
    limit: float | None
    outcome: GateOutcome
    detail: str = ""


class ArmUtterance(Record, frozen=True, kw_only=True):
    """What one arm did with one utterance: enough to recompute every verdict from.

    ``audio_sha256`` is that of the float32 samples; ``rms`` is relative to full scale; ``nonfinite`` counts NaN and
    infinite samples; ``clipped`` is the share of samples at or beyond full scale.
    """

    audio_sha256: str | None
    audio_s: float
    wall_s: tuple[float, ...] = ()
    stages_s: dict[str, float] = {}
    rms: float | None = None
    nonfinite: int = 0
    clipped: float = 0.0
    failure: str | None = None
    hypothesis: str | None = None
    edits: int | None = None


class Utterance(Record, frozen=True, kw_only=True):
    """One text of the gate in both arms.

    ``snr_db`` and ``log_spectrum_l1`` compare patched with baseline: None when the samples are identical, or when they
    cannot be compared (no audio, another length).
    """

    id: str
    repetition: int = 0
    seed: int
    reference_words: int
    baseline: ArmUtterance
    patched: ArmUtterance
    snr_db: float | None = None
    log_spectrum_l1: float | None = None


class Block(Record, frozen=True, kw_only=True):
    """One timed pair of the gate: the same list of utterances in two arms, one right after the other.

    ``kind`` is ``a/a`` (untouched in both), ``a/b`` (untouched, patched) or ``without:FUSION`` (untouched, patched
    without that fusion). ``first`` says which arm ran first. ``wall_s`` and ``audio_s`` have one entry per utterance,
    ``stages_s`` sums over the block, ``device`` holds NVML means over the block.
    """

    kind: str
    index: int
    first: Literal["baseline", "patched"]
    baseline_wall_s: tuple[float, ...]
    patched_wall_s: tuple[float, ...]
    baseline_audio_s: tuple[float, ...]
    patched_audio_s: tuple[float, ...]
    baseline_stages_s: dict[str, float] = {}
    patched_stages_s: dict[str, float] = {}
    baseline_device: dict[str, float] = {}
    patched_device: dict[str, float] = {}


class GateVerdict(Document, frozen=True, kw_only=True, tag="gate-verdict"):
    """The end-to-end verdict of a set of fusions on one stack."""

    protocol: str
    protocol_sha256: str
    stack: str
    stack_version: str
    weights: str
    asr: str | None
    normalizer_sha256: str | None
    fusions: tuple[str, ...]
    environment: Environment
    workload: dict[str, int | float | str | bool | None]
    repetitions: int
    metrics: tuple[Metric, ...]
    guards: tuple[Guard, ...]
    receipts: tuple[Receipt, ...]
    utterances: tuple[Utterance, ...]
    blocks: tuple[Block, ...] = ()
    verdict: GateOutcome
    reasons: tuple[str, ...]
    measured_at: str


AnyDocument = Hotspot | HotspotReport | Fusion | Receipt | MicroVerdict | GateVerdict
DocumentT = TypeVar("DocumentT", bound=Document)


def to_json(record: Record, indent: int = 1) -> bytes:
    """Encode one record as UTF-8 JSON with a final newline; a negative ``indent`` puts it on one line.

    Raises ValueError where the record would not read back the same: JSON has no NaN and no infinity.
    """
    data = msgspec.json.encode(record, enc_hook=_plain)
    try:
        same = msgspec.json.decode(data, type=type(record)) == record
    except msgspec.DecodeError:
        same = False
    if not same:
        raise ValueError(
            f"this {type(record).__name__} does not survive JSON: it holds NaN, an infinity or a value of another type "
            "than declared; use None where a figure is missing"
        )
    return msgspec.json.format(data, indent=indent) + b"\n"


def _plain(value: object) -> str:
    """A subclass of str as str: ``torch.__version__`` is one."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"no JSON for a value of type {type(value).__name__}")


def from_json(data: bytes | str, kind: type[DocumentT]) -> DocumentT:
    """Decode one record of the given type.

    Raises ValueError where the data are not JSON of that type or have another schema version.
    """
    try:
        record = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a {kind.__name__} record: {error}") from error
    if record.schema != SCHEMA_VERSION:
        raise ValueError(
            f"{kind.__name__} has schema version {record.schema}, this voxfuse reads {SCHEMA_VERSION}: "
            "use the voxfuse version that wrote it, or measure again"
        )
    return record


def read(path: Path) -> AnyDocument:
    """Read a record of any type from a file. Raises ValueError, naming the file, where it holds none."""
    try:
        record: AnyDocument = msgspec.json.decode(path.read_bytes(), type=AnyDocument)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a voxfuse record: {error}") from error
    if record.schema != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema version {record.schema}, this voxfuse reads {SCHEMA_VERSION}")
    return record


def write(record: Document, path: Path) -> None:
    """Write one record; an existing file is never overwritten (FileExistsError): records are append-only.

    The file is there whole or, where writing was interrupted, not at all.
    """
    data = to_json(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("xb").close()  # the name is ours from here on
    partial = path.with_name(f"{path.name}.part")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        path.unlink()
        raise


def json_schema(kind: type[Record]) -> dict[str, Any]:
    """The JSON Schema of a record type."""
    return msgspec.json.schema(kind)
