"""A trace as columns: what ran on the devices, what put it there, and under which operation and annotation.

Field names are those of torch 2.9 to 2.13 (Kineto): device events have the categories ``kernel``, ``gpu_memcpy`` and
``gpu_memset`` with ``args`` correlation, device and stream; the calls that put them there ``cuda_runtime`` and
``cuda_driver`` with the same correlation (ROCm uses the same names); operations are ``cpu_op``.
``gpu_user_annotation`` repeats on the device's rows what ``user_annotation`` says on the host's, and is left out, as
are all Python frames but modules. A missing field never ends the reading: what cannot be placed is counted.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from voxfuse.profiles.trace_stream import Event, TraceError, Unreadable, read_events
from voxfuse.records import TensorSignature

MOST_EVENTS = 30_000_000
MOST_NAME_BYTES = 512 << 20
KERNEL, MEMCPY, MEMSET = 0, 1, 2
DEVICE_KINDS = {"kernel": KERNEL, "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}
CALLS = {"cuda_runtime": False, "cuda_driver": True}
MODULE_FRAME = "nn.Module: "
NO_SIGNATURE = -1

Notify = Callable[[int], None]  # called with the number of events read so far


class Lane(NamedTuple):
    """A host thread."""

    process: str
    thread: str


class Span:
    """Columns of events: begin and end in µs, and integers; numpy arrays once read."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._times, self._rows = array("d"), array("q")
        self.begin = self.end = np.empty(0)
        self._table = np.empty((0, len(columns)), dtype=np.int64)

    def add(self, begin: float, end: float, *values: int) -> None:
        self._times.extend((begin, end))
        self._rows.extend(values)

    def close(self) -> None:
        """End the reading: from here on there are numpy arrays."""
        times = np.frombuffer(self._times).reshape(-1, 2)
        self.begin, self.end = times[:, 0].copy(), times[:, 1].copy()
        self._table = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, len(self._columns))

    def __len__(self) -> int:
        return len(self._times) // 2

    def __getitem__(self, column: str) -> np.ndarray:
        return self._table[:, self._columns.index(column)]


class Trace:
    """One file. ``names`` and ``lanes`` are what the columns' integers mean; ``counts`` what was read and left out.

    ``device``: name, device, stream, correlation, kind · ``calls``: name, lane, correlation, driver ·
    ``ops``: name, lane, signature · ``marks``: name, lane.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.names: list[str] = []
        self.lanes: list[Lane] = []
        self.device = Span("name", "device", "stream", "correlation", "kind")
        self.calls = Span("name", "lane", "correlation", "driver")
        self.ops = Span("name", "lane", "signature")
        self.marks = Span("name", "lane")
        self.counts: dict[str, int] = {}
        self.signatures: list[tuple[bytes, bytes, bytes]] = []

    def signature(self, number: int) -> tuple[TensorSignature, ...]:
        """The tensors among an operation's inputs; empty where the trace was taken without shapes."""
        return () if number == NO_SIGNATURE else _signature(*self.signatures[number])


def load(path: Path, notify: Notify = lambda _: None) -> Trace:
    """Read a trace. Raises TraceError where it is none or holds nothing to analyse, OSError where it is absent."""
    trace = Trace(path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace"))
    reader = _Reader(trace)
    unreadable = Unreadable()
    for events in read_events(path, unreadable):
        reader.take(path, events)
        notify(reader.read)
    for columns in (trace.device, trace.calls, trace.ops, trace.marks):
        columns.close()
    trace.counts = {"read": reader.read + unreadable.count, "unreadable": unreadable.count, "unplaced": reader.unplaced}
    if not len(trace.device) and not len(trace.ops):
        raise TraceError(
            f"{path}: {trace.counts['read']} events, and no kernel and no operation among them; profile with the "
            "activities CPU and CUDA"
        )
    return trace


class _Reader:
    """Sorts events into a trace's columns."""

    def __init__(self, trace: Trace) -> None:
        self.read = self.unplaced = 0
        self._trace = trace
        self._names: dict[str, int] = {}
        self._lanes: dict[tuple[object, object], int] = {}
        self._signatures: dict[tuple[bytes, bytes, bytes], int] = {}
        self._name_bytes = 0

    def take(self, path: Path, events: list[Event]) -> None:
        self.read += len(events)
        for event in events:
            if event.ph != "X":
                continue
            cat = event.cat
            if cat in DEVICE_KINDS:
                place = self._add_device
            elif cat == "cpu_op":
                place = self._add_op
            elif cat in CALLS:
                place = self._add_call
            elif cat == "user_annotation" or (cat == "python_function" and event.name.startswith(MODULE_FRAME)):
                place = self._add_mark
            else:
                continue
            begin, duration = event.ts, event.dur or 0.0
            if begin is None or duration < 0 or not math.isfinite(begin + duration):
                self.unplaced += 1
                continue
            place(event, begin, begin + duration)
        if self.read > MOST_EVENTS or self._name_bytes > MOST_NAME_BYTES:
            raise TraceError(
                f"{path}: more than {MOST_EVENTS} events or {MOST_NAME_BYTES >> 20} MiB of different names"
            )

    def _add_device(self, event: Event, begin: float, end: float) -> None:
        args = event.args
        device = stream = correlation = None
        if args is not None:
            device, stream, correlation = args.device, args.stream, args.correlation
        if device is None:
            device = event.pid if isinstance(event.pid, int) else 0
        if stream is None:
            stream = event.tid if isinstance(event.tid, int) else 0
        kind = DEVICE_KINDS[event.cat]
        number = -1 if correlation is None else correlation
        self._trace.device.add(begin, end, self._name(event.name), device, stream, number, kind)

    def _add_call(self, event: Event, begin: float, end: float) -> None:
        correlation = None if event.args is None else event.args.correlation
        name, lane = self._name(event.name), self._lane(event)
        self._trace.calls.add(begin, end, name, lane, -1 if correlation is None else correlation, CALLS[event.cat])

    def _add_op(self, event: Event, begin: float, end: float) -> None:
        args = event.args
        number = NO_SIGNATURE
        if args is not None and args.dims:
            key = (bytes(args.dims), bytes(args.types), bytes(args.strides))
            found = self._signatures.get(key)
            if found is None:
                found = self._signatures[key] = len(self._signatures)
                self._trace.signatures.append(key)
                self._name_bytes += sum(map(len, key))
            number = found
        self._trace.ops.add(begin, end, self._name(event.name), self._lane(event), number)

    def _add_mark(self, event: Event, begin: float, end: float) -> None:
        self._trace.marks.add(begin, end, self._name(event.name), self._lane(event))

    def _name(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
            self._trace.names.append(name)
            self._name_bytes += len(name)
        return number

    def _lane(self, event: Event) -> int:
        key = event.pid, event.tid
        number = self._lanes.get(key)
        if number is None:
            number = self._lanes[key] = len(self._lanes)
            self._trace.lanes.append(Lane(str(event.pid), str(event.tid)))
        return number


_TYPES = {  # as the profiler writes them → as torch does
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "unsigned char": "uint8",
    "signed char": "int8",
}


def _signature(dims: bytes, types: bytes, strides: bytes) -> tuple[TensorSignature, ...]:
    """Tensors by their shapes; scalars and lists have none. What is malformed counts as not told."""
    try:
        shapes = msgspec.json.decode(dims, type=list)
        kinds = msgspec.json.decode(types or b"[]", type=list[str])
        steps = msgspec.json.decode(strides or b"[]", type=list)
    except (msgspec.DecodeError, RecursionError):
        return ()
    found = []
    for index, shape in enumerate(shapes):
        kind = kinds[index] if index < len(kinds) else ""
        stride = steps[index] if index < len(steps) else []
        if kind in ("", "Scalar", "ScalarList", "TensorList", "GenericList") or not _integers(shape):
            continue
        given = tuple(stride) if _integers(stride) else ()
        found.append(TensorSignature(shape=tuple(shape), dtype=_TYPES.get(kind, kind), strides=given))
    return tuple(found)


def _integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
