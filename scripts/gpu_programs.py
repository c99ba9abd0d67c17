"""Steps that are programs of this repository with a time limit: hift, lm, cosyvoice3 and judge.

Their output is in OUT/steps/STEP.txt, also where the time ended them. One that ended well does not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

from gpu_suite_state import KILLED_AFTER_S, NOT_REACHED, Row, Suite, last_line

FEWEST_SECONDS = 15.0 + KILLED_AFTER_S
FINE = (0, 3)  # 3: inconclusive, or not settled yet, which says nothing against the code
SHOWN = 2500  # characters of the output's end, for a terminal that is all that comes back
JUDGED_STACK = "cosyvoice2"
JUDGED_CASE = "64x60001, 7 taps, 1 row, 10 s"


def _hift(suite: Suite) -> list[str]:
    width = ["--device", "cpu", "--width", "32"] if suite.dry else []
    return ["scripts/gpu_hift.py", "--quick", "--out", str(suite.file("hift.jsonl").resolve()), *width]


def _lm(suite: Suite) -> list[str]:
    return ["scripts/gpu_lm.py", *(["--tiny"] if suite.dry else [])]


def _protocol(suite: Suite, sentences: int) -> list[str]:
    protocol, count = ("smoke", 1) if suite.dry else ("full", sentences)
    return ["--device", suite.device.type, "--protocol", protocol, "--sentences", str(count)]


def _cosyvoice3(suite: Suite) -> list[str]:
    folder = (suite.out / "gate-cosyvoice3").resolve()
    command = ["-m", "voxfuse", "gate", "--stack", "cosyvoice3", *_protocol(suite, 12), "--out", str(folder)]
    fusions = "snake_conv_block,sine_source" if suite.dry else "hift_graph,hift_source_graph"  # no graph on a CPU
    return [*command, "--fusions", fusions]


def _judge(suite: Suite) -> list[str]:
    folder = (suite.out / "judge").resolve()
    minutes = max(suite.left() - 2 * KILLED_AFTER_S, 1) / 60
    command = ["-m", "voxfuse", "judge", "--stack", JUDGED_STACK, *_protocol(suite, 6), "--pairs", "30"]
    command += ["--case", JUDGED_CASE, "--budget", f"{minutes:.2f}"]
    return [*command, "--state", str(folder / "state"), "--ledger", str(folder / "ledger")]


PROGRAMS: dict[str, Callable[[Suite], list[str]]] = {
    "hift": _hift,
    "lm": _lm,
    "cosyvoice3": _cosyvoice3,
    "judge": _judge,
}


def _run(name: str, suite: Suite) -> Iterator[Row]:
    saved = suite.saved(name)
    if saved is not None:
        yield Row(name, saved["text"])
        return
    if suite.left() < FEWEST_SECONDS:
        yield Row(name, NOT_REACHED, "missing")
        return
    log = suite.file(f"{name}.txt")
    status = suite.program([sys.executable, *PROGRAMS[name](suite)], log)
    print(log.read_text(errors="replace")[-SHOWN:], flush=True)
    if status is None:
        yield Row(name, f"the time ended it; {log.name} has what it printed; last: {last_line(log)}", "missing")
        return
    text = f"status {status}: {last_line(log)}"
    if status == 0:
        suite.save(name, {"text": text})
    yield Row(name, text, "ok" if status in FINE else "wrong")


hift, lm, cosyvoice3, judge = (partial(_run, name) for name in PROGRAMS)
