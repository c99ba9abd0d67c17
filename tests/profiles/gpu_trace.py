"""GPU traces made by hand: a host that dispatches and launches, streams that run, with torch 2.11's and 2.13's fields.

The simulation's own clocks are what tests compare the analysis with."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LATENCY_US = 3.0  # from the begin of a launch call to the kernel's begin on an idle stream
LAUNCH_US = 4.0  # the launch call itself
MARK_US = 0.01  # what opening a range takes: nested ones never begin at once
PID, TID = 4000, 4001


class GpuTrace:
    """One host thread and its streams; ``now`` and ``stream_end`` are µs."""

    def __init__(self, tid: int = TID, base: float = 1_000.0, correlation: int = 100) -> None:
        self.now, self.tid = base, tid
        self.events: list[dict[str, Any]] = []
        self.stream_end: dict[tuple[int, int], float] = {}
        self.busy: list[tuple[float, float]] = []
        self._correlation = correlation

    def python(self, us: float) -> None:
        self.now += us

    def add(self, cat: str, name: str, ts: float, dur: float, pid: Any = PID, tid: Any = None, **args: Any) -> None:
        tid = self.tid if tid is None else tid
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    @contextlib.contextmanager
    def mark(self, name: str, cat: str = "user_annotation") -> Iterator[None]:
        begin = self.now
        self.now += MARK_US
        yield
        self.add(cat, name, begin, self.now - begin, **{"External id": 1})

    @contextlib.contextmanager
    def op(
        self, name: str, before: float = 6.0, after: float = 2.0, dims: Any = None, types: Any = None
    ) -> Iterator[None]:
        """An operation that dispatches for a while, does what is in the block, and returns."""
        begin = self.now
        self.now += before
        yield
        self.now += after
        args: dict[str, Any] = {"External id": 2}
        if dims is not None:
            strides = [list(reversed([1] * len(shape))) for shape in dims]
            args |= {"Input Dims": dims, "Input type": types or ["float"] * len(dims), "Input Strides": strides}
        self.add("cpu_op", name, begin, self.now - begin, **args)

    def launch(
        self,
        kernel: str,
        us: float,
        *,
        call: str = "cudaLaunchKernel",
        cat: str = "kernel",
        stream: int = 7,
        device: int = 0,
        blocking: bool = False,
    ) -> None:
        correlation = self._next()
        begin = self._run(kernel, us, cat, stream, device, correlation)
        runtime = "cuda_driver" if call.startswith("cu") and not call.startswith("cuda") else "cuda_runtime"
        end = max(begin + us, self.now + LAUNCH_US) + 1.0 if blocking else self.now + LAUNCH_US
        self.add(runtime, call, self.now, end - self.now, cbid=211, correlation=correlation)
        flow = {"id": correlation, "pid": PID, "tid": self.tid, "ts": self.now, "cat": "ac2g", "name": "ac2g"}
        self.events.append({"ph": "s", **flow})
        self.now = end

    def kernel(self, op: str, kernel: str, us: float, **options: Any) -> None:
        """An operation that launches one kernel."""
        shape = options.pop("dims", None)
        with self.op(op, dims=shape):
            self.launch(kernel, us, **options)

    def triton(self, kernel: str, us: float, **options: Any) -> None:
        self.launch(kernel, us, call="cuLaunchKernelEx", **options)

    def graph(self, kernels: list[tuple[str, float]], stream: int = 7) -> None:
        correlation = self._next()
        for kernel, us in kernels:
            self._run(kernel, us, "kernel", stream, 0, correlation)
        self.add("cuda_runtime", "cudaGraphLaunch", self.now, 9.0, correlation=correlation)
        self.now += 9.0

    def sync(self, call: str = "cudaStreamSynchronize") -> None:
        begin = self.now
        self.now = max([self.now + 1.0, *[end + 1.0 for end in self.stream_end.values()]])
        self.add("cuda_runtime", call, begin, self.now - begin, correlation=self._next())

    def _next(self) -> int:
        self._correlation += 1
        return self._correlation

    def _run(self, kernel: str, us: float, cat: str, stream: int, device: int, correlation: int) -> float:
        begin = max(self.now + LATENCY_US, self.stream_end.get((device, stream), 0.0))
        self.stream_end[device, stream] = begin + us
        self.busy.append((begin, begin + us))
        extra = {"grid": [8, 1, 1], "block": [128, 1, 1]} if cat == "kernel" else {"bytes": 1024}
        args = {"device": device, "context": 1, "stream": stream, "correlation": correlation, "External id": 2, **extra}
        self.add(cat, kernel, begin, us, pid=device, tid=stream, **args)
        return begin

    def document(self) -> dict[str, Any]:
        names = [{"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0, "args": {"name": "python"}}]
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 1}],
            "distributedInfo": {"backend": "nccl", "rank": 0, "pg_config": [{"pg_name": "0"}, {"pg_name": "1"}]},
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 1790857026000000000,
            "traceEvents": names + self.events,
            "traceName": "trace.json",
        }

    def write(self, path: Path, indent: int | None = 2) -> Path:
        data = json.dumps(self.document(), indent=indent).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def union_us(intervals: list[tuple[float, float]]) -> float:
    """Length of a union of intervals, the slow and plain way."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total
