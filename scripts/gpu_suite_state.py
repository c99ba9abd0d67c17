"""What the steps of gpu_suite.py share: the run's state, the rows of its table, results kept as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from voxfuse.kernels._op import Run


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
    """One run. ``deadline`` is in ``time.monotonic()`` seconds; ``sets`` are those to gate (none: all)."""

    out: Path
    device: torch.device
    deadline: float
    pairs: int
    gate_args: str
    sets: tuple[int, ...] = ()

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

    def saved(self, name: str) -> dict[str, Any] | None:
        """The result kept under that name, or None."""
        path = self.out / "steps" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def save(self, name: str, result: dict[str, Any]) -> dict[str, Any]:
        """Keep a result, whole or not at all."""
        path = self.out / "steps" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(path)
        return result
