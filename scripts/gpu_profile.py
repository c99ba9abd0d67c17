"""Profile a stack on a GPU, in one command, and keep a small real trace of it as a test's fixture:

    python scripts/gpu_profile.py --out "$OUT" [--stack kokoro] [--sentences 4] [--patched]

Weights are had as for the gate (see scripts/gpu_suite.py). ``voxfuse profile`` runs in a process of its own, with all
that it writes in OUT/profile; then the first request of one short text is cut from a second trace into
OUT/trace-STACK.json.gz (below 1 MB): device events, launches, operations and marks, with the fields that the analysis
reads and without host, user and process names. The hotspot tables go to stdout. Exit status: that of the profile.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from voxfuse.profiles.marks import REQUEST

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_BYTES = 1_000_000
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "cpu_op", "user_annotation")
ARGUMENTS = (
    "correlation", "stream", "device", "context", "grid", "block", "External id", "bytes", "cbid", "graph id",
    "graph node id", "Input Dims", "Input type", "Input Strides",
)  # fmt: skip
VERSIONS = ("schemaVersion", "cuda_runtime_version", "cuda_driver_version")
BASE_US = 1_000.0


def trim(source: Path, target: Path, stop_us: float | None = None) -> int:
    """Cut the first request out of a trace; returns the size. Processes and threads are numbered from 1."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    events = [event for event in document["traceEvents"] if event.get("ph") == "X" and event.get("cat") in CATEGORIES]
    first = min((event for event in events if str(event["name"]).startswith(REQUEST)), key=lambda event: event["ts"])
    begin, end = first["ts"], first["ts"] + first["dur"]
    if stop_us is not None:
        end = min(end, begin + stop_us)
    numbers: dict[Any, int] = {}
    kept = []
    for event in events:
        if begin <= event["ts"] and event["ts"] + event.get("dur", 0) <= end:
            args = {name: value for name, value in event.get("args", {}).items() if name in ARGUMENTS}
            on_device = event["cat"] in CATEGORIES[:3]
            place = {
                name: event[name] if on_device else numbers.setdefault((name, event[name]), 1 + len(numbers))
                for name in ("pid", "tid")
            }
            ts = round(event["ts"] - begin + BASE_US, 3)
            plain = {name: event[name] for name in ("ph", "cat", "name", "dur")}
            kept.append({**plain, **place, "ts": ts, "args": args})
    versions = {name: document[name] for name in VERSIONS if name in document}
    document = {**versions, "traceEvents": kept}
    target.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0))
    return target.stat().st_size


def main(arguments: list[str] | None = None) -> int:
    """Profile twice (the second time for the fixture), trim, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), required="OUT" not in os.environ)
    parser.add_argument("--stack", default="kokoro")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sentences", type=int, default=4)
    parser.add_argument("--patched", action="store_true")
    options = parser.parse_args(arguments)
    out = options.out.resolve()  # the commands below run in the checkout
    name = f"{options.stack}-patched" if options.patched else options.stack
    common = [sys.executable, "-m", "voxfuse", "profile", "--stack", options.stack, "--device", options.device]
    common += ["--patched"] if options.patched else []
    if (
        importlib.util.find_spec("matplotlib") is None
    ):  # the page can be drawn elsewhere: voxfuse hotspots TRACE --out DIR
        common += ["--no-page"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    profile = out / "profile" / name
    status = subprocess.run(
        [*common, "--sentences", str(options.sentences), "--out", str(profile)], cwd=REPOSITORY, env=environment
    ).returncode
    if status:
        return status
    short = out / "profile" / f"{name}-short"
    status = subprocess.run(
        [*common, "--sentences", "1", "--out", str(short), "--json"],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.DEVNULL,
    ).returncode
    if status:
        return status
    target = out / f"trace-{name}.json.gz"
    size = trim(short / "trace.json.gz", target)
    if size > MOST_BYTES:  # the beginning of the request, by time
        wall_us = json.loads((short / "hotspots.json").read_bytes())["processes"][0]["wall_us"]
        while size > MOST_BYTES:
            wall_us *= 0.7
            size = trim(short / "trace.json.gz", target, wall_us)
    print(f"fixture: {target}, {size} bytes")
    return subprocess.run(
        [sys.executable, "-m", "voxfuse", "hotspots", str(target), "--stack", options.stack, "--top", "8"],
        cwd=REPOSITORY,
        env=environment,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
