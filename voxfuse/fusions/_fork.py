"""Independent parts of a captured call side by side: branches of the CUDA graph.

Kernels of one utterance leave part of a large GPU idle, and a graph runs branches at the same time. Larger batches
fill it anyway, and branches hold their memory at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

ResultT = TypeVar("ResultT")
_lanes: dict[tuple[int, int], torch.cuda.Stream] = {}
_lock = threading.Lock()


class Fork(Generic[ResultT]):
    """``call()`` on a stream of its own where the current one is being captured and ``lane`` is a number, else at once
    in place.

    Forks of one lane follow each other and share a stream, whose memory the next one takes over; forks at the same time
    need lanes of their own, nested ones too. Everything that the call reads must stay referenced until ``join``, or the
    caller's stream may write over it: the call itself is kept so long, and with it what it closes over. The call may
    not use cuBLAS, whose workspace of a new stream would stay in the graph's memory pool for good.
    """

    def __init__(self, call: Callable[[], ResultT], lane: int | None) -> None:
        self._call: Callable[[], ResultT] | None = call
        self._stream: torch.cuda.Stream | None = None
        if lane is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._stream = _stream(lane)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._result = call()
            self._done = self._stream.record_event()
        else:
            self._result = call()

    def join(self) -> ResultT:
        """The result, for the current stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done)  # not for later forks of the lane
        self._call = None
        return self._result


def _stream(lane: int) -> torch.cuda.Stream:
    """The lane's stream on the current device. One capture at a time in a process uses it (``_graph_arena``)."""
    key = torch.cuda.current_device(), lane
    with _lock:
        if key not in _lanes:
            _lanes[key] = torch.cuda.Stream(priority=-1)  # from a pool of streams that hardly anybody else draws from
        return _lanes[key]
