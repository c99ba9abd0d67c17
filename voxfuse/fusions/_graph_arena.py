"""CUDA graphs that share a memory pool: capture, order between streams, size, release."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from voxfuse.fusions._weights import Weights
from voxfuse.fusions.buckets import Axes, part
from voxfuse.kernels._op import Counts


class Graph(Protocol):
    """A captured call."""

    def replay(self) -> None:
        """Run it again on the current stream."""


class Arena(Protocol):
    """Where graphs are captured; ``GraphRunner`` needs no more of a device than this, so tests can stand in for one.

    Graphs of one arena share memory, so their replays exclude each other: ``lock`` on the host, ``ordered`` on the
    device.
    """

    lock: threading.RLock

    def capture(self, call: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """The graph of ``call()``, after one run outside of it, and the tensor that a replay fills.

        Raises torch.OutOfMemoryError where that run lacks memory, CaptureError where the call cannot be captured.
        """

    def ordered(self) -> AbstractContextManager[None]:
        """What the current stream is given inside runs after what any stream was given inside before."""

    def bytes(self) -> int:
        """Device memory that the graphs hold, in bytes."""

    def close(self) -> None:
        """Wait for the last replay, then give the memory back."""


class CaptureError(RuntimeError):
    """A call that runs, but not under capture: it waits for the device, for example, or memory does not suffice."""


# One capture at a time in a process: torch.cuda.graph synchronises the device, which another capture does not survive.
_capturing = threading.Lock()


def abandon(current: torch.cuda.Stream, pool: Any) -> None:
    """Undo what a capture leaves behind whose end raised too: its stream, and its hold on the pool."""
    torch.cuda.set_stream(current)
    device = current.device_index
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # it came that far by itself
        return
    torch._C._cuda_releasePool(device, pool)


class CudaArena:
    """Graphs of one CUDA device, captured on a stream of their own into one memory pool.

    The stream is the arena's own because cuBLAS keeps one workspace a stream: graphs captured on the same one could
    not run side by side. Another thread that synchronises the whole device during a capture breaks it (CUDA's rule):
    capture before serving.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._done = torch.cuda.Event()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, call: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.device(self._device):
            with self.ordered():
                call()  # on the caller's stream: what it packs or plans outlives the capture
            current = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    output = call()
            except RuntimeError as error:
                abandon(current, self._pool)
                cause = error.__context__ or error  # the call's own error, where ending the capture raised another
                raise CaptureError(str(cause).partition("\n")[0]) from error
        self._graphs.append(graph)
        return graph, output

    @contextmanager
    def ordered(self) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done)
        try:
            yield
        finally:
            self._done.record(stream)

    def bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(self._pool))

    def close(self) -> None:
        self._done.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class Key(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    rows: int
    bucket: int
    numerics: tuple[Any, ...]

    @property
    def place(self) -> tuple[torch.device, int]:
        """The shelf: graphs of like size on one device."""
        return self.device, (self.rows * self.bucket).bit_length()


@dataclass(eq=False)
class Shelf:
    """An arena with what was captured in it; ``used`` orders shelves by their last use."""

    arena: Arena
    held: dict[Key, Captured] = field(default_factory=dict)
    used: int = 0
    bytes: int = 0
    closed: bool = False


class Cut(NamedTuple):
    """Views of a bucket's static tensors at one length."""

    inputs: list[torch.Tensor]
    output: torch.Tensor


@dataclass(eq=False)
class Captured:
    """A captured bucket with its static tensors. It keeps what it reads (``weights`` as they were, ``kept``), so that
    a replay after a change of weights reads old values, but never memory that was given back.

    ``filled`` units of the inputs hold data, zeros lie behind. ``uniform``: what all of ``lengths`` are, or 0.
    ``numbers``: what an input given as a number holds, by its place. ``cuts``: views by length, at most as many as the
    bucket has lengths.
    """

    shelf: Shelf
    graph: Graph
    inputs: list[torch.Tensor]
    lengths: torch.Tensor
    output: torch.Tensor
    counts: Counts
    weights: Weights
    kept: list[Any]
    input_axes: tuple[Axes, ...]
    output_axes: Axes
    filled: int = 0
    uniform: int = 0
    numbers: dict[int, float] = field(default_factory=dict)
    cuts: dict[int, Cut] = field(default_factory=dict)

    def fill(
        self,
        length: int,
        tensors: Sequence[torch.Tensor | float],
        lengths: torch.Tensor | Sequence[int] | None,
    ) -> torch.Tensor:
        """Give the inputs of the next replay a length and their values; returns the view that its output will be in.

        Raises ValueError where a tensor is not what was captured, cut to this length.
        """
        cut = self.cuts.get(length) or self._cut(length)
        views, given = [], []
        for place, (view, tensor) in enumerate(zip(cut.inputs, tensors, strict=True)):
            if isinstance(tensor, torch.Tensor):
                if tensor.shape != view.shape or tensor.dtype != view.dtype or tensor.device != view.device:
                    expected = f"{list(view.shape)}, {view.dtype} on {view.device}"
                    raise ValueError(
                        f"expected {expected}, got {list(tensor.shape)}, {tensor.dtype} on {tensor.device}"
                    )
                views.append(view)
                given.append(tensor)
                self.numbers.pop(place, None)
            elif self.numbers.get(place) != tensor:
                view.fill_(tensor)  # an argument of the launch, as are lengths below: no copy from the host to wait for
                self.numbers[place] = tensor
        torch._foreach_copy_(views, given)
        if self.filled > length:
            for static, axes, view in zip(self.inputs, self.input_axes, cut.inputs, strict=True):
                if view.shape != static.shape:
                    part(static, axes, length, self.filled).zero_()
        self.filled = length
        if lengths is None:
            if self.uniform != length:
                self.lengths.fill_(length)
            self.uniform = length
            return cut.output
        self.uniform = 0
        if isinstance(lengths, torch.Tensor):
            self.lengths.copy_(lengths)
        else:
            for row, valid_units in zip(self.lengths, lengths, strict=True):
                row.fill_(valid_units)
        return cut.output

    def _cut(self, length: int) -> Cut:
        with torch.inference_mode(False), torch.no_grad():
            inputs = [part(static, axes, 0, length) for static, axes in zip(self.inputs, self.input_axes, strict=True)]
            cut = self.cuts[length] = Cut(inputs, part(self.output, self.output_axes, 0, length))
        return cut


def numerics() -> tuple[Any, ...]:
    """Settings that a capture bakes in."""
    precision = torch._C._get_fp32_precision_getter
    kinds = precision("cuda", "conv"), precision("cuda", "matmul"), precision("cuda", "rnn")
    return *kinds, torch._C._get_deterministic_algorithms()
