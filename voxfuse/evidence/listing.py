"""The ledger as a table: one row per verdict, filtered."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from voxfuse.evidence import ledger
from voxfuse.records import MicroVerdict


class Row(NamedTuple):
    """One verdict. ``outcome`` lists the ratio to every baseline of a micro verdict, or the gate's verdict."""

    measured_at: str
    judge: str
    stack: str
    subject: str
    case: str
    gpu: str
    compute_capability: str
    outcome: str
    file: str


class Filter(NamedTuple):
    """What a listing is narrowed to; None takes all. ``gpu``: a compute capability or a part of the GPU's name.

    ``outcome`` is a gate's verdict, ``wrong``, or a micro verdict's comparison with the eager chain.
    """

    fusion: str | None = None
    stack: str | None = None
    gpu: str | None = None
    outcome: str | None = None

    def takes(self, verdict: ledger.Verdict) -> bool:
        """Whether a verdict is listed."""
        fusions = (verdict.fusion,) if isinstance(verdict, MicroVerdict) else verdict.fusions
        stack = verdict.case.stack if isinstance(verdict, MicroVerdict) else verdict.stack
        return (
            (self.fusion is None or self.fusion in fusions)
            and (self.stack is None or self.stack == stack)
            and (self.gpu is None or on_gpu(verdict, self.gpu))
            and (self.outcome is None or self.outcome == outcome(verdict))
        )


def on_gpu(verdict: ledger.Verdict, gpu: str) -> bool:
    """Whether a verdict was measured on a GPU given by its compute capability, or by a part of its name."""
    environment = verdict.environment
    return gpu == environment.compute_capability or gpu.lower() in (environment.gpu or "CPU").lower()


def outcome(verdict: ledger.Verdict) -> str:
    """A gate's verdict; of a micro verdict ``wrong``, its comparison with the eager chain, or ``not compared``."""
    if not isinstance(verdict, MicroVerdict):
        return verdict.verdict
    if verdict.wrong is not None:
        return "wrong"
    return {ratio.baseline: ratio.verdict for ratio in verdict.ratios}.get("eager", "not compared")


def rows(folders: Iterable[Path] | None = None, narrowed: Filter | None = None) -> list[Row]:
    """The verdicts of the ledger (or of the given folders), oldest first; unreadable files are warned about."""
    narrowed = narrowed or Filter()
    return [_row(entry) for entry in ledger.load(folders) if narrowed.takes(entry.verdict)]


def _row(entry: ledger.Entry) -> Row:
    verdict = entry.verdict
    if isinstance(verdict, MicroVerdict):
        judge, stack, subject = "micro", verdict.case.stack, verdict.fusion
        ratios = (f"{ratio.verdict} {ratio.median:.2f}× {ratio.baseline}" for ratio in verdict.ratios)
        said = f"wrong: {verdict.wrong}" if verdict.wrong is not None else ", ".join(ratios)
    else:
        judge, stack, subject = "gate", f"{verdict.stack} {verdict.stack_version}", ", ".join(verdict.fusions)
        said = verdict.verdict if verdict.verdict == "pass" else f"{verdict.verdict}: {'; '.join(verdict.reasons)}"
    return Row(
        measured_at=verdict.measured_at,
        judge=judge,
        stack=stack,
        subject=subject,
        case=ledger.case(verdict),
        gpu=verdict.environment.gpu or "CPU",
        compute_capability=verdict.environment.compute_capability or "",
        outcome=said,
        file=str(entry.path),
    )


def show(listed: list[Row], folders: Iterable[Path], narrowed: bool = False) -> None:
    """Print the rows as a table, or say that there are none and in which folders they were looked for."""
    from rich.table import Table

    from voxfuse._terminal import plain, table_console

    console = table_console()
    if not listed:
        nothing = "No verdict matches." if narrowed else "The ledger holds no verdict yet."
        console.print(nothing + " Looked in:", *map(str, folders), sep="\n  ", markup=False)
        return
    table = Table(*("measured at", "judge", "stack", "fusions", "case", "GPU", "outcome"), title="Ledger")
    for row in listed:
        gpu = f"{row.gpu} ({row.compute_capability})" if row.compute_capability else row.gpu
        cells = (row.measured_at, row.judge, row.stack, row.subject, row.case, gpu, row.outcome)
        table.add_row(*(plain(cell) for cell in cells))
    console.print(table)
