"""Step ``micro``: one MicroVerdict per committed case, as ``voxfuse bench`` judges them, what is wanted first first.

The order is that of ``gpu_cases.txt`` (its head says how). A case that raises is a row, and the next one follows.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import torch
from gpu_suite_state import NOT_REACHED, Row, Suite

from voxfuse.evidence import ledger
from voxfuse.microbench import bench
from voxfuse.microbench.cases import JudgedCase
from voxfuse.profiles.environment import capture_environment
from voxfuse.records import MicroVerdict

WANTED = Path(__file__).with_name("gpu_cases.txt")
DEADLY = "micro-deadly"


class Wanted(NamedTuple):
    """The patterns in their order, and when a record must have been measured for its case to come last."""

    patterns: tuple[str, ...]
    since: datetime


def wanted(path: Path = WANTED) -> Wanted:
    """The committed list. Raises ValueError where it has no line ``since TIME``."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    times = [line.removeprefix("since ") for line in lines if line.startswith("since ")]
    if len(times) != 1:
        raise ValueError(f"{path}: expected one line 'since 2026-12-01T15:00:00+00:00', found {len(times)}")
    since = datetime.fromisoformat(times[0])
    since = since if since.tzinfo else since.replace(tzinfo=timezone.utc)
    return Wanted(tuple(line for line in lines if not line.startswith("since ")), since)


def name_of(judged: JudgedCase) -> str:
    """As the patterns name a case."""
    return "|".join(bench.key_of(judged.fusion, judged.case))


def ordered(
    cases: Iterable[JudgedCase], order: Wanted, verdicts: Iterable[MicroVerdict], gpu: str | None
) -> list[JudgedCase]:
    """Cases without a recent, right and sound verdict of this kind of GPU before those with one; within both the
    patterns' order, then the cases'."""
    done = {
        bench.key_of(verdict.fusion, verdict.case)
        for verdict in verdicts
        if verdict.environment.gpu == gpu
        and ledger.moment(verdict) >= order.since
        and verdict.wrong is None
        and verdict.controls["sound"] == 1.0
    }

    def rank(judged: JudgedCase) -> tuple[bool, int]:
        matching = (index for index, pattern in enumerate(order.patterns) if fnmatchcase(name_of(judged), pattern))
        return bench.key_of(judged.fusion, judged.case) in done, next(matching, len(order.patterns))

    return sorted(cases, key=rank)


def chosen(dry: bool) -> list[JudgedCase]:
    """All cases in the order wanted here; few and tiny ones in a dry run."""
    verdicts = [entry.verdict for entry in ledger.load() if isinstance(entry.verdict, MicroVerdict)]
    cases = ordered(bench.choose(), wanted(), verdicts, capture_environment().gpu)
    return bench.tiny(cases) if dry else cases


def run(suite: Suite) -> Iterator[Row]:
    """One row per case, and one for all that have no verdict. A case is judged again where the verdict in OUT is
    wrong, unsound or of other code; one that left the GPU in error comes last when the suite goes on."""
    folder = suite.out / "records"
    entries = ledger.load([folder] if folder.exists() else [])
    verdicts = [entry.verdict for entry in entries if isinstance(entry.verdict, MicroVerdict)]
    there = bench.reusable(verdicts, capture_environment(bench.PACKAGES), suite.dry)
    plan = bench.bench_for(suite.device, suite.pairs, suite.left)
    deadly = (suite.saved(DEADLY) or {"cases": []})["cases"]
    raised: dict[str, str] = {}
    missing: list[str] = []

    def broke(judged: JudgedCase, error: Exception) -> None:
        traceback.print_exception(error, limit=-3)
        name = name_of(judged)
        raised[name] = f"broke: {type(error).__name__}: {error}"[:300]
        if (fault := _device_fault(plan.device)) is not None:
            suite.save(DEADLY, {"cases": [*deadly, name]})
            raise RuntimeError(f"{name} left the GPU in error, so this process judges no more: {fault}") from error

    cases = sorted(chosen(suite.dry), key=lambda judged: name_of(judged) in deadly)
    for judged in bench.run(cases, plan, there, lambda verdict: ledger.append(verdict, folder), broke=broke):
        name = name_of(judged.case)
        if name in raised:
            yield Row(name, raised[name], "wrong")
        elif judged.verdict is None:
            missing.append(name)
        else:
            yield _row(name, judged.verdict, judged.outcome, suite.dry)
    if missing:
        text = f"{NOT_REACHED}, or of a library that is absent (a warning says so); the first of them: {missing[0]}"
        yield Row(f"{len(missing)} cases", text, "missing")


def _device_fault(device: torch.device) -> str | None:
    """What the device answers after a case raised; an illegal access stays with the process."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize()
        torch.ones(1, device=device)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _row(name: str, verdict: MicroVerdict, outcome: bench.Outcome, dry: bool) -> Row:
    text = bench.summary(verdict)
    if outcome == "unsound":
        return Row(name, f"controls unsound; {text}", "ok" if dry else "wrong")  # a dry run claims nothing
    return Row(name, text, "wrong" if outcome == "wrong" else "ok")
