"""The ledger as a table: one row per verdict."""

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


def rows(folders: Iterable[Path] | None = None) -> list[Row]:
    """Every verdict of the ledger (or of the given folders), oldest first; unreadable files are warned about."""
    return [_row(entry) for entry in ledger.load(folders)]


def _row(entry: ledger.Entry) -> Row:
    verdict = entry.verdict
    if isinstance(verdict, MicroVerdict):
        judge, stack, subject = "micro", verdict.case.stack, verdict.fusion
        ratios = (f"{ratio.verdict} {ratio.median:.2f}× {ratio.baseline}" for ratio in verdict.ratios)
        outcome = f"wrong: {verdict.wrong}" if verdict.wrong is not None else ", ".join(ratios)
    else:
        judge, stack, subject = "gate", f"{verdict.stack} {verdict.stack_version}", ", ".join(verdict.fusions)
        outcome = verdict.verdict if verdict.verdict == "pass" else f"{verdict.verdict}: {'; '.join(verdict.reasons)}"
    return Row(
        measured_at=verdict.measured_at,
        judge=judge,
        stack=stack,
        subject=subject,
        case=ledger.case(verdict),
        gpu=verdict.environment.gpu or "CPU",
        compute_capability=verdict.environment.compute_capability or "",
        outcome=outcome,
        file=str(entry.path),
    )


def show(listed: list[Row], folders: Iterable[Path]) -> None:
    """Print the rows as a table, or say that there are none and in which folders they were looked for."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not listed:
        console.print("The ledger holds no verdict yet. Looked in:", *map(str, folders), sep="\n  ", markup=False)
        return
    table = Table(*("measured at", "judge", "stack", "fusions", "case", "GPU", "outcome"), title="Ledger")
    for row in listed:
        gpu = f"{row.gpu} ({row.compute_capability})" if row.compute_capability else row.gpu
        cells = (row.measured_at, row.judge, row.stack, row.subject, row.case, gpu, row.outcome)
        table.add_row(*(escape(cell) for cell in cells))
    console.print(table)
