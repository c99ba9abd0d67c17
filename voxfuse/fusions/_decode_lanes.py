"""Lanes of decoding: a static cache of a bucket with the CUDA graph captured on it; taken, given back, evicted."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from voxfuse.fusions import decode_step
from voxfuse.fusions._graph_arena import Arena, CaptureError, CudaArena, Graph, numerics
from voxfuse.fusions._weights import Weights
from voxfuse.fusions.decode_step import KeyValues
from voxfuse.fusions.graph_runner import OUTER_CAPTURE, CapturePolicy, Statistics, capture_asked
from voxfuse.kernels._op import TALLIES, Counts, Run

SHORTEST = 256  # tokens of the smallest bucket


class Key(NamedTuple):
    """What lanes are alike in."""

    rows: int
    bucket: int
    dtype: torch.dtype
    device: torch.device
    numerics: tuple[Any, ...]


@dataclass(eq=False)
class Lane:
    """A static cache and the tensors of a step on it, with its graph, or the reason why it has none.

    ``active`` int64 [rows]: by how much the length of each row grows in a step, 1 or 0.
    """

    key: Key
    cache: KeyValues
    embeddings: torch.Tensor
    lengths: torch.Tensor
    active: torch.Tensor
    reason: str | None = None
    arena: Arena | None = None
    graph: Graph | None = None
    output: torch.Tensor | None = None
    counts: Counts = field(default_factory=Counts)
    bytes: int = 0
    used: int = 0
    taken: bool = True
    references: int = 0

    def __post_init__(self) -> None:
        self.references = self._references()

    @property
    def shared(self) -> bool:
        """Whether somebody else still holds a view of the cache."""
        return self._references() > self.references

    def _references(self) -> int:
        return sum(torch._C._storage_Use_Count(part.untyped_storage()._cdata) for part in self.cache)

    def ordered(self) -> AbstractContextManager[None]:
        """What the current stream is given inside runs after what any stream was given inside before."""
        return nullcontext() if self.arena is None else self.arena.ordered()

    def advance(self, decoder: Any, head: nn.Module | None, run: Run) -> torch.Tensor:
        """A step, and the new lengths: what the graph holds."""
        output = decode_step.step(decoder, self.embeddings, self.cache, self.lengths, run, head)
        self.lengths.add_(self.active)
        return output

    def close(self) -> None:
        """Give the graph's memory back, after its last replay."""
        if self.arena is not None:
            self.arena.close()
        self.arena = self.graph = self.output = None


def bucket_of(tokens: int) -> int:
    """The capacity of the cache that holds so many tokens."""
    return max(SHORTEST, 1 << (tokens - 1).bit_length())


def cuda_arena(device: torch.device) -> Arena:
    """The arena of one lane. Raises CaptureError where the device has no graphs."""
    if device.type != "cuda":
        raise CaptureError(f"graphs need a CUDA GPU, the model is on {device}")
    return CudaArena(device)


class Lanes:
    """The lanes of one decoder and its head, both held weakly.

    A lane in use is closed by nobody; free ones leave by least recent use above the memory cap, and all of them once
    weights were replaced, which ``take`` looks for.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: nn.Module | None,
        run: Run,
        capture: CapturePolicy,
        memory_cap_bytes: int,
        arena: Callable[[torch.device], Arena],
    ) -> None:
        self._decoder = weakref.ref(decoder)
        self._head = None if head is None else weakref.ref(head)
        self._run, self._policy, self._cap, self._make_arena = run, capture, memory_cap_bytes, arena
        self._held: list[Lane] = []
        self._wanted: set[Key] = set()  # captured once
        self._refused: dict[Key, str] = {}
        self._weights: list[Weights] = []
        self._clock = 0
        self._lock = threading.RLock()
        self.statistics = Statistics()
        weakref.finalize(self, _close_all, self._held).atexit = False

    @property
    def decoder(self) -> Any:
        """The decoder. Raises ReferenceError once it is gone."""
        return _living(self._decoder)

    @property
    def head(self) -> Any:
        """The head, or None where there is none. Raises ReferenceError once it is gone."""
        return None if self._head is None else _living(self._head)

    def take(self, rows: int, bucket: int, warming: bool = False) -> Lane:
        """A lane for one session: a free one, a new one where it may be captured, or one without a graph.

        Raises torch.OutOfMemoryError where the cache itself finds no memory.
        """
        weight = self.decoder.norm.weight
        key = Key(rows, bucket, weight.dtype, weight.device, numerics())
        outer = weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            self._drop_if_stale()
            self._clock += 1
            for lane in self._held:
                if lane.key == key and not lane.taken and not lane.shared and not outer:
                    lane.taken, lane.used = True, self._clock
                    return lane
            lane = self._empty(key)
            asked = warming or self._policy == "first_use" or key in self._wanted or capture_asked(anywhere=True)
            lane.reason = OUTER_CAPTURE if outer else self._refused.get(key)
            if lane.reason is None and not asked:
                lane.reason = f"no lane of {rows} rows × {bucket}: warm up inside voxfuse.capturing()"
            if lane.reason is None:
                self._capture(lane)
            return lane

    def give_back(self, lane: Lane) -> None:
        """End a session's hold on its lane."""
        with self._lock:
            lane.taken = False
            if lane not in self._held:  # its weights were replaced meanwhile
                lane.close()

    def forget_refusals(self) -> None:
        """Let what could not be captured be tried once more."""
        with self._lock:
            self._refused.clear()

    def count(self, lane: Lane) -> None:
        """Count a step on a lane: a replay, with what its capture counted, or a miss with its reason."""
        if lane.reason is not None:
            self.count_miss(lane.reason)
            return
        with self._lock:
            self.statistics.replays += 1
        TALLIES.add_all(lane.counts)

    def count_miss(self, reason: str) -> None:
        """Count a call that runs without a graph."""
        with self._lock:
            if reason is OUTER_CAPTURE:
                self.statistics.direct += 1
            else:
                self.statistics.misses[reason] += 1
        TALLIES.add(self._run.receipt, fallback=reason)

    def _empty(self, key: Key) -> Lane:
        with torch.inference_mode(False), torch.no_grad():
            return Lane(
                key,
                decode_step.empty_cache(self.decoder, key.rows, key.bucket),
                torch.zeros(key.rows, 1, self.decoder.config.hidden_size, dtype=key.dtype, device=key.device),
                torch.zeros(key.rows, dtype=torch.int64, device=key.device),
                torch.ones(key.rows, dtype=torch.int64, device=key.device),
                used=self._clock,
            )

    def _capture(self, lane: Lane) -> None:
        """Capture the lane's graph, or write down why it has none."""
        key, decoder, head, run = lane.key, self.decoder, self.head, self._run
        self._weights = self._weights or [Weights(part) for part in (decoder, head) if part is not None]
        decoder, head = weakref.ref(decoder), head if head is None else weakref.ref(head)

        def call() -> torch.Tensor:
            counts.clear()  # of the run before the capture
            return lane.advance(decoder(), head if head is None else head(), run)

        try:
            lane.arena = self._make_arena(key.device)
            with torch.inference_mode(False), torch.no_grad(), TALLIES.diverted() as counts, lane.arena.lock:
                lane.graph, lane.output = lane.arena.capture(call)
        except (torch.OutOfMemoryError, CaptureError) as error:
            cause = str(error).partition("\n")[0][:160]
            self._refuse(lane, f"capture of {key.rows} rows × {key.bucket} failed: {cause}")
            return
        lane.counts = counts.copy()
        own = (*lane.cache, lane.embeddings, lane.lengths, lane.active)
        lane.bytes = lane.arena.bytes() + sum(tensor.nbytes for tensor in own)
        self._held.append(lane)
        self._wanted.add(key)
        self.statistics.captures += 1
        for other in sorted(self._held, key=lambda other: other.used):
            if self._bytes() > self._cap and not other.taken:
                self._drop(other)
        if self._bytes() > self._cap:
            self._drop(lane)
            size = f"its {lane.bytes} bytes beside the lanes in use are above the memory cap of {self._cap}"
            self._refuse(lane, f"capture of {key.rows} rows × {key.bucket} given up: {size}")
        self.statistics.bytes = self._bytes()

    def _refuse(self, lane: Lane, reason: str) -> None:
        lane.close()
        lane.reason = self._refused[lane.key] = reason
        warnings.warn(f"{reason}; such generations run without a graph", RuntimeWarning, stacklevel=4)

    def _bytes(self) -> int:
        return sum(lane.bytes for lane in self._held)

    def _drop(self, lane: Lane) -> None:
        self._held.remove(lane)
        self._wanted.discard(lane.key)
        lane.close()
        self.statistics.evictions += 1

    def _drop_if_stale(self) -> None:
        if any(weights.changed() for weights in self._weights):
            _close_all([lane for lane in self._held if not lane.taken])
            self._held.clear()
            self._refused.clear()
            self._weights = []
            self.statistics.bytes = 0


def _living(reference: weakref.ref[nn.Module]) -> nn.Module:
    module = reference()
    if module is None:
        raise ReferenceError("the decoder or head of this runner is gone: runners hold them weakly")
    return module


def _close_all(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.close()
