"""Which fusions a profile asks for: a narrow view of what ``voxfuse profile`` writes.

The profile runs in a process of its own, since a profiler's hooks would slow what is timed after it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

MAX_BYTES = 256 << 20
NO_SUCH_COMMAND = "No such command"


class Matches(NamedTuple):
    """The fusions to judge, and why those. ``again``: a later run should profile once more."""

    fusions: tuple[str, ...]
    note: str
    again: bool = False


class _Hotspot(msgspec.Struct):
    fusions: tuple[str, ...] = ()


class _Process(msgspec.Struct):
    hotspots: tuple[_Hotspot, ...] = ()


class _Report(msgspec.Struct):
    """``hotspots.json``, as far as it is needed here."""

    processes: tuple[_Process, ...]


def matched_fusions(stack: str, device: str, folder: Path, known: tuple[str, ...], timeout_s: float) -> Matches:
    """Profile a stack into ``folder`` and give those of its ``known`` fusions that match a hotspot.

    Where there is no profile to go by, all known ones are taken, and the note says so.
    """
    command = [
        sys.executable,
        "-m",
        "voxfuse",
        "profile",
        "--stack",
        stack,
        "--device",
        device,
        "--out",
        str(folder),
        "--no-page",
    ]
    everything = f"so all fusions of {stack} are judged"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, timeout_s), check=False)
    except subprocess.TimeoutExpired:
        return Matches(known, f"the profile did not end within {timeout_s:.0f} s, {everything}", again=True)
    if done.returncode != 0:
        if NO_SUCH_COMMAND in done.stderr:
            return Matches(known, f"this version has no voxfuse profile, {everything}")
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Matches(known, f"voxfuse profile ended with {done.returncode} ({last[:200]}), {everything}")
    return read_matches(folder / "hotspots.json", stack, known)


def read_matches(path: Path, stack: str, known: tuple[str, ...]) -> Matches:
    """The known fusions that a ``hotspots.json`` names, the most promising hotspot's first."""
    everything = f"so all fusions of {stack} are judged"
    try:
        if path.stat().st_size > MAX_BYTES:
            return Matches(known, f"{path} has more than {MAX_BYTES} bytes, {everything}")
        report = msgspec.json.decode(path.read_bytes(), type=_Report)
    except (OSError, msgspec.DecodeError) as error:
        return Matches(known, f"{path} cannot be read ({error}), {everything}")
    named = [name for process in report.processes for hotspot in process.hotspots for name in hotspot.fusions]
    found = tuple(name for name in dict.fromkeys(named) if name in known)
    left_out = [name for name in known if name not in found]
    note = f"{len(found)} of {len(known)} fusions match a hotspot of {path}"
    return Matches(found, note + (f"; not judged: {', '.join(left_out)}" if left_out else ""))
