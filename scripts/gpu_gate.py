"""Step ``gate``: speak the gate's texts with real weights; scoring happens on any machine, later."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_suite_state import NOT_REACHED, REPOSITORY, Row, Suite

from voxfuse.commands.gate_sets import gate_sets
from voxfuse.fusions.registry import FUSIONS
from voxfuse.patches import registry

FEWEST_SECONDS = 45.0  # to load the model and speak anything worth it


def run(suite: Suite) -> Iterator[Row]:
    """One row a set of fusions that are gated together, graphs first; each has its own run directory."""
    stack = registry.patches_of("kokoro")
    assert stack is not None, "Kokoro has patches"
    for number, fusions in enumerate(gate_sets(tuple(FUSIONS), stack.patches, suite.run.backend), 1):
        if not suite.sets or number in suite.sets:
            yield _gated(suite, suite.out / f"gate-{number}", fusions)


def _gated(suite: Suite, folder: Path, fusions: tuple[str, ...]) -> Row:
    """The gate resumes its own run directory; here it is only stopped in time."""
    name = f"kokoro, {', '.join(fusions)}"
    if suite.left() < FEWEST_SECONDS:
        return Row(name, NOT_REACHED, "missing")
    protocol = ["--protocol", "smoke", "--sentences", "1"] if suite.dry else ["--protocol", "full"]
    folder = folder.resolve()
    command = [sys.executable, "-m", "voxfuse", "gate", "--stack", "kokoro", "--device", suite.device.type, *protocol]
    command += ["--generate-only", "--out", str(folder), "--fusions", ",".join(fusions)]
    command += shlex.split(suite.gate_args)
    try:
        ran = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=max(10.0, suite.left() - 10)
        )
    except subprocess.TimeoutExpired:
        spoken = len(list(folder.rglob("*.flac")))
        return Row(name, f"{spoken} audio files so far; {NOT_REACHED}", "missing")
    print(f"{ran.stderr[-3000:]}\n{ran.stdout[-3000:]}", flush=True)
    spoken = len(list(folder.rglob("*.flac")))
    last_line = ((ran.stdout.strip() or ran.stderr.strip()).splitlines() or [""])[-1]
    text = f"status {ran.returncode}, {spoken} audio files; {last_line[:200]}"
    return Row(name, text, "ok" if ran.returncode in (0, 3) else "wrong")
