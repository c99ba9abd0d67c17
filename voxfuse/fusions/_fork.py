"""Independent parts of a captured call side by side: branches of the CUDA graph.

Kernels of one utterance leave part of a large GPU idle, and a graph runs branches at the same time. Larger batches
fill it anyway, and branches hold their memory at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

ResultT = TypeVar("ResultT")


class Fork(Generic[ResultT]):
    """``call()`` on a stream of its own where the current one is being captured and ``apart``, else at once in place.

    Everything that the call reads must stay referenced until ``join``, or the caller's stream may write over it: the
    call itself is kept so long, and with it what it closes over. The call may not use cuBLAS, whose workspace of a new
    stream would stay in the graph's memory pool for good.
    """

    def __init__(self, call: Callable[[], ResultT], apart: bool) -> None:
        self._call: Callable[[], ResultT] | None = call
        self._stream: torch.cuda.Stream | None = None
        if apart and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self._stream = torch.cuda.Stream(priority=-1)  # a pool of streams that hardly anybody else draws from
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._result = call()
        else:
            self._result = call()

    def join(self) -> ResultT:
        """The result, for the current stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._call = None
        return self._result
