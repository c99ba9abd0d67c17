"""What the steps of gpu_suite.py share: the run's state, the rows of its table, results kept as JSON, programs with a
time limit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from voxfuse.kernels._op import Run

REPOSITORY = Path(__file__).resolve().parents[1]
KILLED_AFTER_S = 8  # an interrupted program writes what it has
# Where several processes share the cores: Inductor would start a worker for each core in every one of them.
ONE_CORE = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class Row:
    """One line of the table. ``missing``: the budget did not reach it; ``wrong``: it must be looked at."""

    what: str
    text: str
    outcome: Literal["ok", "missing", "wrong"] = "ok"
    step: str = ""

    def of(self, step: str) -> Row:
        """The same row, said to come from a step."""
        return replace(self, step=step)

    def __str__(self) -> str:
        mark = {"ok": " ", "missing": "?", "wrong": "!"}[self.outcome]
        return f"{mark} {self.step:<8} {self.what:<44} {self.text}"


NOT_REACHED = "not reached within the budget"


@dataclass(frozen=True)
class Suite:
    """One run. ``deadline`` is in ``time.monotonic()`` seconds; ``sets`` are those to gate (none: all), ``kernels``
    patterns of those under the sanitizer (none: all), ``tests`` the test files that come first."""

    out: Path
    device: torch.device
    deadline: float
    pairs: int
    gate_args: str
    sets: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    @property
    def dry(self) -> bool:
        """Whether this is the dry run on a CPU."""
        return self.device.type == "cpu"

    @property
    def run(self) -> Run:
        """Backend and receipt of directly called fused ops."""
        return Run("reference" if self.dry else "triton", "gpu_suite")

    def left(self) -> float:
        """Seconds left."""
        return self.deadline - time.monotonic()

    def within(self, seconds: float) -> Suite:
        """The same run for a step that may take so long from now."""
        return replace(self, deadline=min(self.deadline, time.monotonic() + seconds))

    def file(self, name: str) -> Path:
        """A file of that name among the steps' results."""
        path = self.out / "steps" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def saved(self, name: str) -> dict[str, Any] | None:
        """The result kept under that name, or None."""
        path = self.out / "steps" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, name: str, result: dict[str, Any]) -> dict[str, Any]:
        """Keep a result, whole or not at all."""
        path = self.file(f"{name}.json")
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(path)
        return result

    def program(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int | None:
        """The exit status of a program whose output goes to ``log``, or None where the time ended it: it and all that
        it started are interrupted when nothing is left but the time to write what they have."""
        seconds = math.ceil(self.left()) - KILLED_AFTER_S
        if seconds <= 0:
            return None
        # coreutils' timeout ends the whole process group, and dies with this session, as a group of ours would not
        limited = ["timeout", "-s", "INT", "-k", str(KILLED_AFTER_S), str(seconds), *command]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        with log.open("w") as file:
            status = subprocess.run(
                limited, cwd=REPOSITORY, env=variables, stdout=file, stderr=subprocess.STDOUT
            ).returncode
        return None if status in (124, 137, -9) else status


def last_line(log: Path, length: int = 200) -> str:
    """The last line that a program wrote."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:length] if lines else ""
