"""Why a fusion is on or off by default on a GPU: the rule's answer, and the newest verdicts that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from voxfuse.evidence.acceptance import Acceptance, accepted
from voxfuse.evidence.ledger import Entry, case
from voxfuse.evidence.listing import outcome
from voxfuse.records import Fusion, GateVerdict, MicroVerdict


class Ground(NamedTuple):
    """One verdict that the answer rests on."""

    judge: str
    case: str
    gpu: str
    outcome: str
    detail: str
    file: str


class Why(NamedTuple):
    """Whether ``policy="proven"`` applies a fusion on a stack's release and a compute capability, and its grounds."""

    fusion: str
    stack: str
    stack_version: str
    compute_capability: str | None
    acceptance: Acceptance
    grounds: tuple[Ground, ...]
    to_settle: str


def explain(
    fusion: Fusion, stack: str, stack_version: str, compute_capability: str | None, entries: Sequence[Entry]
) -> Why:
    """Explain one fusion on one stack. Grounds are the newest verdicts of every case and protocol on that compute
    capability; without any there, those of all others, since the default then follows them."""
    acceptance = accepted(fusion, stack, stack_version, compute_capability, list(entries))
    own = [entry for entry in entries if _concerns(entry, fusion.name, stack)]
    here = [entry for entry in own if entry.verdict.environment.compute_capability == compute_capability]
    newest = {(entry.verdict.environment.gpu, case(entry.verdict)): entry for entry in (here or own)}
    return Why(
        fusion=fusion.name,
        stack=stack,
        stack_version=stack_version,
        compute_capability=compute_capability,
        acceptance=acceptance,
        grounds=tuple(_ground(entry) for entry in newest.values()),
        to_settle="" if acceptance.accepted and here else f"voxfuse judge --stack {stack}",
    )


def _concerns(entry: Entry, fusion: str, stack: str) -> bool:
    verdict = entry.verdict
    if isinstance(verdict, MicroVerdict):
        return verdict.fusion == fusion and verdict.case.stack == stack
    return verdict.stack == stack and fusion in verdict.fusions


def _ground(entry: Entry) -> Ground:
    verdict = entry.verdict
    if isinstance(verdict, GateVerdict):
        judge, detail = "gate", "; ".join(verdict.reasons) or f"all {len(verdict.guards)} guards passed"
    elif verdict.wrong is not None:
        judge, detail = "micro", verdict.wrong
    else:
        judge = "micro"
        detail = ", ".join(f"{r.median:.2f}× [{r.low:.2f}, {r.high:.2f}] {r.baseline}" for r in verdict.ratios)
    gpu = verdict.environment.gpu or "CPU"
    return Ground(judge, case(verdict), gpu, outcome(verdict), detail, str(entry.path))
