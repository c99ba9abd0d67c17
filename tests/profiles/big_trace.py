"""A big trace in the exact layout of Kineto's writer: ``python tests/profiles/big_trace.py PATH MEGABYTES``."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

OPERATIONS = ("mul", "add", "sin", "pow", "conv1d", "instance_norm", "mul", "cat", "linear", "tanh")
EVENT = """
  {{
    "ph": "X",
    "cat": "{cat}",
    "name": "{name}",
    "pid": {pid},
    "tid": {tid},
    "ts": {ts:.3f},
    "dur": {dur:.3f}
    ,
    "args": {{
      {args}
    }}
  }}"""
FLOW = """
  {{
    "ph": "{ph}", "id": {n}, "pid": 1, "tid": 2, "ts": {ts:.3f}, "cat": "ac2g", "name": "ac2g"
  }}"""
SHAPES = (
    '"External id": {n},"Record function id": 0, "Concrete Inputs": ["", "", "1"], '
    '"Input type": ["float", "float", "Scalar"], "Input Strides": [[{s}, 8000, 1], [256, 1, 1], []], '
    '"Input Dims": [[1, 256, 8000], [1, 256, 1], []], "Ev Idx": {n}'
)
LAUNCH = '"External id": {n},"cbid": 211, "correlation": {n}'
KERNEL = (
    '"External id": {n},"queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {n}, '
    '"registers per thread": 32, "shared memory": 0, "blocks per SM": 15.5, "warps per SM": 62, '
    '"grid": [2048, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 97'
)
HEAD = '{\n  "schemaVersion": 1,\n  "deviceProperties": [],\n  "displayTimeUnit": "ms",\n  "traceEvents": ['
TAIL = '\n  ],\n  "traceName": "big.json"\n}\n'


def operation(n: int) -> str:
    """One module call with one operation, its inner operation, launch, kernel and flow events."""
    at, name = 5.2e12 + 30.0 * n, OPERATIONS[n % len(OPERATIONS)]
    mark = f"voxfuse module: decoder.resblocks.{n % 7}.{name}|Block"
    events = [
        EVENT.format(cat="user_annotation", name=mark, pid=1, tid=2, ts=at, dur=25, args=f'"External id": {n}'),
        EVENT.format(
            cat="cpu_op", name=f"aten::{name}", pid=1, tid=2, ts=at + 1, dur=20, args=SHAPES.format(n=n, s=n % 50)
        ),
        EVENT.format(
            cat="cpu_op", name=f"aten::{name}_", pid=1, tid=2, ts=at + 3, dur=15, args=SHAPES.format(n=n, s=1)
        ),
        EVENT.format(
            cat="cuda_runtime", name="cudaLaunchKernel", pid=1, tid=2, ts=at + 8, dur=5, args=LAUNCH.format(n=n)
        ),
        FLOW.format(ph="s", n=n, ts=at + 8),
        EVENT.format(
            cat="kernel",
            name=f"void at::native::vectorized_elementwise_kernel<4, {name}>(int)",
            pid=0,
            tid=7,
            ts=at + 12,
            dur=2 + n % 5,
            args=KERNEL.format(n=n),
        ),
        FLOW.format(ph="f", n=n, ts=at + 12),
    ]
    return ",".join(events)


def write_big(path: Path, size: int) -> int:
    """Write at least ``size`` bytes (before compression); returns the number of operations."""
    number = written = 0
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        file.write(HEAD)
        while written < size:
            text = ",".join(operation(n) for n in range(number, number + 500))
            file.write(text if number == 0 else "," + text)
            written += len(text)
            number += 500
        file.write(TAIL)
    return number


if __name__ == "__main__":
    print(write_big(Path(sys.argv[1]), int(float(sys.argv[2]) * 1e6)), "operations")
