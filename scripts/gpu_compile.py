"""Step ``compile``: fill Triton's and Inductor's caches on disk for the step ``micro``, a case a core.

``python scripts/gpu_compile.py I N SECONDS DEVICE`` prepares every N-th case from the I-th on, in the order of
``micro`` (the case of ``judge`` first), and calls each arm once. Nothing is timed and nothing is kept but the caches.
Prints a line a case.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from gpu_micro import chosen, name_of
from gpu_programs import JUDGED_CASE, JUDGED_STACK
from gpu_suite_state import KILLED_AFTER_S, NOT_REACHED, ONE_CORE, Row, Suite, last_line

from voxfuse.kernels._op import Run
from voxfuse.microbench.arms import contest
from voxfuse.microbench.bench import Bench, bench_for
from voxfuse.microbench.cases import JudgedCase
from voxfuse.microbench.ceilings import MATMULS
from voxfuse.microbench.timer import HostClock

PROCESSES = 4  # beside ten of the tests and two of the sanitizer, on 16 cores
# of no machine: a contest asks for ceilings, and none of this is judged
CEILINGS = {"launch_floor_us": 1.0, "peak_copy_bytes_per_s": 1.0} | {f"peak_{name}_flop_per_s": 1.0 for name in MATMULS}
PREPARED, RAISED, LATE = "prepared", "RAISED", "not reached"


def run(suite: Suite) -> Iterator[Row]:
    """One row in all, and one a case that raises: what it will do in ``micro`` too."""
    saved = suite.saved("compile")
    if saved is not None:
        yield Row("caches", saved["text"])
        return
    if suite.left() < 2 * KILLED_AFTER_S:
        yield Row("caches", NOT_REACHED, "missing")
        return
    seconds = str(suite.left() - KILLED_AFTER_S - 2)
    processes = 2 if suite.dry else PROCESSES
    logs = [suite.file(f"compile-{index}.txt") for index in range(processes)]

    def shard(index: int) -> int | None:
        command = [sys.executable, __file__, str(index), str(processes), seconds, suite.device.type]
        return suite.program(command, logs[index], ONE_CORE)

    with ThreadPoolExecutor(processes) as pool:
        statuses = list(pool.map(shard, range(processes)))
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    count = {word: sum(line.startswith(word) for line in lines) for word in (PREPARED, RAISED, LATE)}
    text = f"{count[PREPARED]} cases prepared by {processes} processes, {count[LATE]} {LATE}"
    for line in (line for line in lines if line.startswith(RAISED)):
        yield Row("case", line, "wrong")
    broken = [log for log, status in zip(logs, statuses, strict=True) if status not in (0, None)]
    if broken:
        yield Row("caches", f"{text}; a process ended with: {last_line(broken[0])}", "wrong")
    elif count[LATE] or None in statuses:
        yield Row("caches", text, "missing")
    else:
        suite.save("compile", {"text": text})
        yield Row("caches", text)


def needed(cases: list[JudgedCase]) -> list[JudgedCase]:
    """Cases in their order, but those of the step ``judge`` first: a record does not keep it from judging again."""
    return sorted(cases, key=lambda item: item.case.stack != JUDGED_STACK or JUDGED_CASE not in item.case.name)


@torch.no_grad()
def prepare(judged: JudgedCase, plan: Bench) -> None:
    """Call every arm of a case once, on inputs of its types, shapes and strides, under the judge's settings."""
    # The judge's ceilings set this and set it back, which leaves "ieee" for "none": a part of Inductor's cache key.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    how = Run(plan.backend, "compile")
    made = contest(judged.fusion, judged.case, plan.device, HostClock(), how, CEILINGS, plan.compile_backend)
    for call in (made.voxfuse, *made.baselines.values()):
        if not isinstance(call, str):
            call(*made.sets[0])


def main() -> None:
    """Prepare one shard."""
    first, step, seconds, device = sys.argv[1:]
    deadline = time.monotonic() + float(seconds)
    plan = bench_for(torch.device(device), 30, lambda: 0.0)
    for judged in needed(chosen(plan.dry))[int(first) :: int(step)]:
        name = name_of(judged)
        if time.monotonic() > deadline:
            print(f"{LATE} {name}")
            continue
        try:
            prepare(judged, plan)
            print(f"{PREPARED} {name}")
        except ImportError as absent:
            print(f"absent {name}: {absent}")
        except Exception as error:  # any case's failure is its own
            print(f"{RAISED} {name}: {type(error).__name__}: {str(error).strip()[:200]!r}")
            traceback.print_exc(limit=-3)
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
