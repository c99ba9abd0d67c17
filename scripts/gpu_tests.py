"""Step ``tests``: the tests marked ``gpu`` in ten processes, those asked for first."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_suite_state import KILLED_AFTER_S, NOT_REACHED, ONE_CORE, REPOSITORY, Row, Suite, last_line
from gpu_tests_plugin import NOTES, PASSED

PROCESSES = 10
MOST_LISTED = 20
ALONE = ("tests/microbench/test_timer.py", "tests/microbench/test_sensitivity.py")  # they time: step checks runs them
DRY = ALONE[0]


def run(suite: Suite) -> Iterator[Row]:
    """A row for all, and one for each failure, whose short tracebacks are in OUT/steps/tests-failures.txt. What passed
    before is not run again."""
    passed = list((suite.saved("tests") or {"passed": []})["passed"])
    if suite.left() < 20 + KILLED_AFTER_S:
        yield Row("tests marked gpu", f"{len(passed)} passed before; {NOT_REACHED}", "missing")
        return
    log, notes, known = suite.file("tests.txt"), suite.file("tests.jsonl"), suite.file("tests-passed.json")
    notes.write_text("")
    known.write_text(json.dumps(passed))  # every worker must collect the same: none reads what the others append
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--timeout", "120"]
    command += ["-p", "gpu_tests_plugin", "-p", "no:cacheprovider"]
    command += ["-n", str(2 if suite.dry else PROCESSES), "--dist", "load", "--maxschedchunk", "1"]
    paths = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    variables = {**ONE_CORE, NOTES: str(notes.resolve()), PASSED: str(known.resolve()), "PYTHONPATH": paths}
    if not suite.dry:
        variables["VOXFUSE_TEST_GPU"] = "1"
    status = suite.program([*command, *([DRY] if suite.dry else in_order(suite.tests))], log, variables)
    ended = [json.loads(line) for line in notes.read_text().splitlines()]
    failures = [note for note in ended if note["outcome"] == "failed"]
    passed += [note["test"] for note in ended if note["outcome"] == "passed"]
    suite.save("tests", {"passed": sorted(set(passed))})
    text = "\n\n".join(f"{note['test']} ({note['when']})\n{note['text']}" for note in failures)
    suite.file("tests-failures.txt").write_text(text)
    summary = f"{len(passed)} passed in all, {len(failures)} failed"
    if status is None:
        yield Row("tests marked gpu", f"{summary}; the rest {NOT_REACHED}", "wrong" if failures else "missing")
    else:
        fine = status in (0, 5)  # 5: none was left
        yield Row("tests marked gpu", f"{summary}; {last_line(log)}", "ok" if fine else "wrong")
    for note in failures[:MOST_LISTED]:
        yield Row(note["test"], note["text"].strip().splitlines()[-1][:300], "wrong")


def in_order(first: tuple[str, ...]) -> list[str]:
    """The files with tests marked gpu, ``first`` before the others. Only these are collected: others may import what a
    GPU machine lacks. The cases of tests/benchmarks are those of the step ``micro``; of ``ALONE``, see there."""
    files = sorted(path for path in (REPOSITORY / "tests").rglob("test_*.py") if path.parent.name != "benchmarks")
    marked = [str(path.relative_to(REPOSITORY)) for path in files if "mark.gpu" in path.read_text(encoding="utf-8")]
    return [*first, *(name for name in marked if name not in (*first, *ALONE))]
