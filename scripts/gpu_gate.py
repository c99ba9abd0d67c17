"""Step ``gate``: speak the gate's texts with real weights; scoring happens on any machine, later."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_suite_state import NOT_REACHED, Row, Suite

REPOSITORY = Path(__file__).resolve().parents[1]
FEWEST_SECONDS = 45.0  # to load the model and speak anything worth it


def run(suite: Suite) -> Iterator[Row]:
    """One row. The gate resumes its own run directory; here it is only stopped in time."""
    if suite.left() < FEWEST_SECONDS:
        yield Row("kokoro, --generate-only", NOT_REACHED, "missing")
        return
    protocol = ["--protocol", "smoke", "--sentences", "1"] if suite.dry else ["--protocol", "full"]
    folder = (suite.out / "gate").resolve()
    command = [sys.executable, "-m", "voxfuse", "gate", "--stack", "kokoro", "--device", suite.device.type, *protocol]
    command += ["--generate-only", "--out", str(folder), *shlex.split(suite.gate_args)]
    try:
        ran = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=max(10.0, suite.left() - 10)
        )
    except subprocess.TimeoutExpired:
        spoken = len(list(folder.rglob("*.flac")))
        yield Row("kokoro, --generate-only", f"{spoken} audio files so far; {NOT_REACHED}", "missing")
        return
    print(f"{ran.stderr[-3000:]}\n{ran.stdout[-3000:]}", flush=True)
    spoken = len(list(folder.rglob("*.flac")))
    last_line = ((ran.stdout.strip() or ran.stderr.strip()).splitlines() or [""])[-1]
    text = f"status {ran.returncode}, {spoken} audio files; {last_line[:200]}"
    yield Row("kokoro, --generate-only", text, "ok" if ran.returncode in (0, 3) else "wrong")
