"""Step ``micro``: one MicroVerdict per committed case, as ``voxfuse bench`` judges them."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_suite_state import NOT_REACHED, Row, Suite

from voxfuse.evidence import ledger
from voxfuse.microbench import bench
from voxfuse.profiles.environment import capture_environment
from voxfuse.records import MicroVerdict


def run(suite: Suite) -> Iterator[Row]:
    """One row per case. A case is judged again where the verdict in OUT is wrong, unsound or of other code."""
    cases = bench.choose()
    folder = suite.out / "records"
    entries = ledger.load([folder] if folder.exists() else [])
    verdicts = [entry.verdict for entry in entries if isinstance(entry.verdict, MicroVerdict)]
    there = bench.reusable(verdicts, capture_environment(bench.PACKAGES), suite.dry)
    plan = bench.bench_for(suite.device, suite.pairs, suite.left)
    for judged in bench.run(bench.tiny(cases) if suite.dry else cases, plan, there, lambda v: ledger.append(v, folder)):
        yield _row(judged, suite.dry)


def _row(judged: bench.Judged, dry: bool) -> Row:
    name, verdict = judged.case.case.name, judged.verdict
    if verdict is None:
        return Row(name, NOT_REACHED, "missing")
    text = bench.summary(verdict)
    if judged.outcome == "unsound":
        return Row(name, f"controls unsound; {text}", "ok" if dry else "wrong")  # a dry run claims nothing
    return Row(name, text, "wrong" if judged.outcome == "wrong" else "ok")
