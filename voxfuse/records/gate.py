"""Records of patches at work and of the end-to-end gate: receipts, utterances, timed blocks, guards, the verdict."""

from __future__ import annotations

from typing import Literal

from voxfuse.records.base import Document, Environment, Record

Backend = Literal["triton", "interpreter", "reference"]
Status = Literal["applied", "pending", "skipped", "deferred", "reverted"]
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
    infinite samples; ``clipped`` is the share of samples at or beyond full scale; ``oracle_snr_db`` is the
    signal-to-noise ratio against what fp64 makes of the same inputs, where the stack can tell.
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
    oracle_snr_db: float | None = None


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
    """One timed pair of the gate: the same list of utterances in two arms that take turns.

    ``kind`` is ``a/a`` (untouched in both), ``a/b`` (untouched, patched) or ``without:FUSION`` (untouched, patched
    without that fusion). ``first`` says which arm spoke the first utterance; the other begins the next. ``wall_s`` and
    ``audio_s`` have one entry per utterance, ``stages_s`` sums over the block, ``device`` holds NVML means of the arm
    by itself.
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
