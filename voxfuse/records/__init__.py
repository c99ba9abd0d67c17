"""The records that pass between the rooms: hotspot, fusion, receipt and verdicts, as data.

Every record is JSON with a schema version. A verdict carries the raw samples that it was computed from, so that it
can be recomputed; ``json_schema`` gives the JSON Schema (draft 2020-12) of a record type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from voxfuse.records.base import SCHEMA_VERSION, Contract, Document, Environment, Record, TensorSignature
from voxfuse.records.gate import (
    ArmUtterance,
    Backend,
    Block,
    GateOutcome,
    GateVerdict,
    Guard,
    Metric,
    Receipt,
    Status,
    Utterance,
)
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

Comparison = Literal["win", "loss", "neutral"]


class Case(Record, frozen=True, kw_only=True):
    """One shape at which a fusion is judged; ``parameters`` are the scalar arguments."""

    name: str
    stack: str
    tensors: dict[str, TensorSignature]
    parameters: dict[str, int | float | str | bool] = {}


class Arm(Record, frozen=True, kw_only=True):
    """One contender of a micro verdict.

    ``gpu_us`` are per-pair samples, in the same order in every arm of the verdict (graph replay, or wall time with the
    wait where the case's parameter ``timed`` is "wall", and of the fusion ``istft_polar``, whose cases do not say it);
    ``host_us`` is the eager host cost of one call; ``error_fp64`` is the relative RMS error against the fp64 oracle.
    ``absent`` says why an arm could not run, and then nothing else is set.
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
