"""Bucketed CUDA graphs of a length-aware call: rows × lengths are captured once, replayed at any length below.

A graph has fixed shapes, so inputs are padded to a bucket and the valid length of each row goes along as a device
tensor; a call that masks by it gives at a bucket what it gives at the exact length (see kernels/adain.py). Graphs
whose rows × bucket lie within one power of two share an arena (a memory pool): its size is about that of its largest
graph, those of all arenas form a geometric series, and an arena can be given back as a whole, which single graphs of a
pool cannot. Above the memory cap, arenas leave by least recent use.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from voxfuse.fusions._graph_arena import Arena, Captured, CaptureError, CudaArena, Key, Shelf, numerics
from voxfuse.fusions._weights import Weights
from voxfuse.fusions.buckets import Axes, Buckets, common_length, shape
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels._packs import collected

CapturePolicy = Literal["warmup", "first_use"]
OUTER_CAPTURE = "inside somebody else's CUDA graph capture"
HOOKED = "has a forward hook, which a graph would not run"
WEIGHTS_REPLACED = "weights were replaced: captured again"
_asked = threading.local()
_inside = 0  # threads that are inside ``capturing``
_inside_lock = threading.Lock()
_blocks = itertools.count(1)  # every outermost ``capturing`` of a thread
_runners: weakref.WeakSet[GraphRunner] = weakref.WeakSet()


@dataclass
class Statistics:
    """``captures`` include ``recaptures`` (new weights); ``misses`` by reason ran uncaptured, ``direct`` calls inside
    somebody else's capture; ``evictions`` are graphs that left for memory; ``bytes`` of the device are held now."""

    captures: int = 0
    recaptures: int = 0
    replays: int = 0
    direct: int = 0
    evictions: int = 0
    bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)


@contextmanager
def capturing() -> Iterator[None]:
    """Let calls of this thread capture inside: warm up by speaking once at each length that will be served.

    What could not be captured before is tried again, once. Decoding is captured in other threads too: stacks decode in
    threads that they start themselves.
    """
    global _inside
    if not capture_asked():
        _asked.block = next(_blocks)
    _asked.depth = getattr(_asked, "depth", 0) + 1  # counted: coroutines of one thread need not leave in order
    with _inside_lock:
        _inside += 1
    try:
        yield
    finally:
        _asked.depth -= 1
        with _inside_lock:
            _inside -= 1


def capture_asked(anywhere: bool = False) -> bool:
    """Whether this thread, or any thread, is inside ``capturing``."""
    return _inside > 0 if anywhere else getattr(_asked, "depth", 0) > 0


def _block() -> int:
    """The number of the ``capturing`` that this thread is inside of, or 0."""
    return _asked.block if capture_asked() else 0


def no_graphs(run: Run, device: torch.device) -> str | None:
    """Why there are no graphs with this backend or on this device, or None."""
    if run.backend != "triton" or device.type != "cuda":
        return "graphs need a CUDA GPU and backend 'triton'"
    return None


def runners(module: nn.Module) -> list[GraphRunner]:
    """The runners of a module and of what it contains, for their statistics and ``warm``."""
    parts = set(module.modules())
    return [runner for runner in list(_runners) if runner._owner() in parts]


class GraphRunner:
    """Replays ``call(owner, *tensors, lengths)`` from CUDA graphs where its bucket was captured, else calls it.

    ``call`` returns one tensor and must mask by ``lengths``, int64 [rows] on the device, or None where all of every
    tensor is valid; it may draw no random numbers and not wait for the device. ``inputs`` and ``output`` give the axes
    of each tensor behind the rows; the output is zero behind each row's length. ``capture``: "warmup" captures only in
    ``warm`` and ``capturing``, "first_use" wherever a bucket is missing; a bucket is captured again once the owner's
    weights are replaced (what counts as such: ``weights``). ``foreign`` is asked before every capture and says why the
    owner, which may have other parts than at the last one, cannot be captured, or None. ``owner`` is held weakly.
    Misses count on ``receipt``; replays count what the fused operations counted at capture. Safe from several threads
    and streams.
    """

    def __init__(
        self,
        owner: nn.Module,
        call: Callable[..., torch.Tensor],
        inputs: Sequence[Axes],
        output: Axes,
        buckets: Buckets,
        *,
        memory_cap_bytes: int,
        receipt: str,
        capture: CapturePolicy = "warmup",
        arena: Callable[[torch.device], Arena] = CudaArena,
        weights: Callable[[nn.Module], Weights] = Weights,
        foreign: Callable[[Any], str | None] | None = None,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._call = call
        self.inputs, self._output = tuple(inputs), output
        self._buckets, self._cap, self._receipt, self._policy = buckets, memory_cap_bytes, receipt, capture
        self._make_arena, self._watch, self._foreign = arena, weights, foreign
        self._shelves: dict[tuple[torch.device, int], Shelf] = {}
        self._wanted: set[Key] = set()  # captured once, and not evicted for memory since
        self._refused: dict[Key, tuple[str, int]] = {}  # why, and in which ``capturing``
        self._weights: Weights | None = None
        self._clock = itertools.count(1)
        self._lock = threading.RLock()  # never taken while an arena's lock is held
        self.statistics = Statistics()
        weakref.finalize(self, _close, self._shelves).atexit = False
        _runners.add(self)

    @property
    def owner(self) -> nn.Module:
        """The module whose call this is. Raises ReferenceError once it is gone."""
        owner = self._owner()
        if owner is None:
            raise ReferenceError("the module of this graph runner is gone: runners hold theirs weakly")
        return owner

    def __call__(self, *tensors: torch.Tensor, lengths: torch.Tensor | Sequence[int] | None = None) -> torch.Tensor:
        """The call's output at the exact length of ``tensors``, in memory of its own.

        ``lengths`` [rows]: valid units of each row, integers or a tensor on the device; all of them for None. Raises
        ValueError where tensors have other axes than declared.
        """
        length = common_length(tensors, self.inputs)
        found = self.find(tensors[0].shape[0], length, tensors[0].device, tensors[0].dtype)
        if isinstance(found, str):
            self.count_miss(found)
            return self.uncaptured(tensors, lengths)
        return self.replay(found, length, *tensors, lengths=lengths)

    def attempt(
        self, length: int, *tensors: torch.Tensor | float, lengths: torch.Tensor | Sequence[int] | None = None
    ) -> torch.Tensor | str:
        """``find`` and ``replay``, or why the call must run uncaptured, not counted. The first tensor has the rows.

        Weights are compared while the device is at work on the replay; where they were replaced, what it gives is
        thrown away. For calls into which no random numbers go, since upstream's call may follow.
        """
        rows, device, dtype = tensors[0].shape[0], tensors[0].device, tensors[0].dtype  # type: ignore[union-attr]
        found = self.find(rows, length, device, dtype, False)
        if isinstance(found, str):
            return found
        output = self._replayed(found, length, tensors, lengths)
        if output is not None and not found.weights.changed():
            self._count(found)
            return output
        found = self.find(rows, length, device, dtype)
        return found if isinstance(found, str) else self.replay(found, length, *tensors, lengths=lengths)

    def find(
        self, rows: int, length: int, device: torch.device, dtype: torch.dtype, compare: bool = True
    ) -> Captured | str:
        """The captured bucket of a call, captured now where the policy lets it, or why the call must run uncaptured.

        ``compare`` False: one that is there is given without a look at the weights.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return OUTER_CAPTURE
        reason = self._buckets.refusal(rows, length)
        if reason is not None:
            return reason
        key = Key(device, dtype, rows, self._buckets.of(length), numerics())
        with self._lock:
            held = self._held(key)
            if compare or held is None:
                self._drop_if_stale()
                held = self._held(key)
            if held is not None:
                held.shelf.used = next(self._clock)
                return held
            if key in self._refused:
                refused, block = self._refused[key]
                if _block() in (0, block):
                    return refused
            if key in self._wanted or self._policy == "first_use" or capture_asked():
                return self._capture(key)
        return f"no graph of {rows} rows × {key.bucket}: warm up inside voxfuse.capturing()"

    def replay(
        self,
        found: Captured,
        length: int,
        *tensors: torch.Tensor | float,
        lengths: torch.Tensor | Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Replay what ``find`` gave for the rows and this length of these tensors; else as ``__call__``.

        An input without a length may be a number, which then is all of it.
        """
        output = self._replayed(found, length, tensors, lengths)
        if output is not None:
            self._count(found)
            return output
        self.count_miss("its graph left while the call was under way")
        whole = (
            tensor if isinstance(tensor, torch.Tensor) else torch.full_like(static, tensor)
            for static, tensor in zip(found.inputs, tensors, strict=True)
        )
        return self.uncaptured(list(whole), lengths)

    def _replayed(
        self,
        found: Captured,
        length: int,
        tensors: Sequence[torch.Tensor | float],
        lengths: torch.Tensor | Sequence[int] | None,
    ) -> torch.Tensor | None:
        """What a replay gives, in memory of its own, or None where the graph has left."""
        arena = found.shelf.arena
        with arena.lock:
            if found.shelf.closed:
                return None
            with torch.no_grad(), arena.ordered():
                filled = found.fill(length, tensors, lengths)
                found.graph.replay()
                return filled.clone(memory_format=torch.contiguous_format)

    def _count(self, found: Captured) -> None:
        with self._lock:
            self.statistics.replays += 1
        TALLIES.add_all(found.counts)

    def warm(self, shapes: Iterable[tuple[int, int]], device: torch.device | str, dtype: torch.dtype) -> None:
        """Capture the buckets of these (rows, length), refused ones once more; largest first, to share memory.

        What cannot be captured warns (RuntimeWarning) and is in ``statistics.misses`` once it is called.
        """
        device = torch.empty(0, device=device).device  # "cuda" with its index
        with self._lock:
            self._refused.clear()
        with capturing():
            for rows, length in sorted(set(shapes), key=lambda item: -item[0] * item[1]):
                self.find(rows, length, device, dtype)

    def count_miss(self, reason: str) -> None:
        """Count a call that runs uncaptured; for callers of ``find``, which counts nothing."""
        with self._lock:
            if reason is OUTER_CAPTURE:
                self.statistics.direct += 1
            else:
                self.statistics.misses[reason] += 1
        TALLIES.add(self._receipt, fallback=reason)

    def uncaptured(self, tensors: Sequence[torch.Tensor], lengths: torch.Tensor | Sequence[int] | None) -> torch.Tensor:
        """What a graph captures, called without one, at the exact length of ``tensors``."""
        if lengths is not None:
            lengths = torch.as_tensor(lengths, dtype=torch.int64, device=tensors[0].device)
        return self._call(self.owner, *tensors, lengths)

    def _held(self, key: Key) -> Captured | None:
        shelf = self._shelves.get(key.place)
        return None if shelf is None else shelf.held.get(key)

    def _capture(self, key: Key) -> Captured | str:
        if self._foreign is not None:
            with torch.no_grad():  # asked of its structure
                reason = self._foreign(self.owner)
            if reason is not None:
                return reason  # asked again at the next call: it ends once the part is upstream's own again
        shelf = self._shelves.get(key.place) or Shelf(self._make_arena(key.device))
        try:
            captured = self._record(key, shelf)
        except (torch.OutOfMemoryError, CaptureError) as error:
            cause = str(error).partition("\n")[0][:160]
            return self._refuse(key, f"capture of {key.rows} rows × {key.bucket} failed: {cause}")
        shelf.held[key], shelf.used = captured, next(self._clock)
        self._shelves[key.place] = shelf
        tensors = (t for entry in shelf.held.values() for t in (*entry.inputs, entry.lengths))
        shelf.bytes = shelf.arena.bytes() + sum(tensor.nbytes for tensor in tensors)
        self.statistics.captures += 1
        if key in self._wanted:
            self.statistics.recaptures += 1
            TALLIES.add(self._receipt, fallback=WEIGHTS_REPLACED)
        self._wanted.add(key)
        if shelf.bytes > self._cap:
            self._evict(key.place)
            size = f"its arena of {shelf.bytes} bytes is above the memory cap of {self._cap}"
            return self._refuse(key, f"capture of {key.rows} rows × {key.bucket} given up: {size}")
        while sum(other.bytes for other in self._shelves.values()) > self._cap:
            self._evict(min(self._shelves, key=lambda place: self._shelves[place].used))
        self._sum_bytes()
        return captured

    def _record(self, key: Key, shelf: Shelf) -> Captured:
        module = self.owner
        self._weights = self._weights or self._watch(module)
        with torch.inference_mode(False), torch.no_grad():
            inputs = [
                torch.zeros(shape(key.rows, axes, key.bucket), device=key.device, dtype=key.dtype)
                for axes in self.inputs
            ]
            lengths = torch.full((key.rows,), key.bucket, device=key.device)

            run, owner = self._call, self._owner

            def call() -> torch.Tensor:
                counts.clear()  # of the run before the capture
                return run(owner(), *inputs, lengths)

            with TALLIES.diverted() as counts, collected() as packs, shelf.arena.lock:
                graph, output = shelf.arena.capture(call)
        if output.shape != shape(key.rows, self._output, key.bucket):
            raise ValueError(f"expected an output of axes {self._output}, got {list(output.shape)}")
        kept = [*packs, *self._weights.memory()]
        told = counts.copy(), self._weights, kept, self.inputs, self._output
        return Captured(shelf, graph, inputs, lengths, output, *told, uniform=key.bucket)

    def _refuse(self, key: Key, reason: str) -> str:
        self._refused[key] = reason, _block()
        warnings.warn(f"{reason}; this bucket runs uncaptured", RuntimeWarning, stacklevel=4)
        return reason

    def _drop_if_stale(self) -> None:
        if self._weights is not None and self._weights.changed():
            _close(self._shelves)
            self._shelves.clear()
            self._sum_bytes()
            self._refused.clear()
            self._weights = None

    def _evict(self, place: tuple[torch.device, int]) -> None:
        held = self._shelves[place].held
        self._wanted.difference_update(held)
        self.statistics.evictions += len(held)
        _close({place: self._shelves.pop(place)})
        self._sum_bytes()

    def _sum_bytes(self) -> None:
        self.statistics.bytes = sum(shelf.bytes for shelf in self._shelves.values())


def _close(shelves: dict[tuple[torch.device, int], Shelf]) -> None:
    for shelf in shelves.values():
        with shelf.arena.lock:
            shelf.closed = True
            shelf.arena.close()
            shelf.held.clear()
