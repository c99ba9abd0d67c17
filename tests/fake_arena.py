"""A CUDA arena's stand-in on the CPU: a replay runs the captured call again and fills the same output."""

import threading
from contextlib import contextmanager

from voxfuse.kernels._op import TALLIES


class FakeGraph:
    def __init__(self, call, output):
        self._call, self._output = call, output

    def replay(self):
        with TALLIES.diverted():  # a CUDA graph counts nothing
            self._output.copy_(self._call())


class FakeArena:
    """``bytes`` is that of the largest output captured; ``fail`` raises in the next captures."""

    made: list["FakeArena"]  # set by the fixture
    fail: Exception | None = None

    def __init__(self, device):
        self.lock = threading.RLock()
        self.device, self.closed, self.captured = device, False, []
        self._inside = False
        type(self).made.append(self)

    def capture(self, call):
        if type(self).fail is not None:
            raise type(self).fail
        call()
        output = call().clone()
        self.captured.append(output)
        return FakeGraph(call, output), output

    @contextmanager
    def ordered(self):
        assert not self._inside, "two replays of one arena at once"
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def bytes(self):
        return max(output.nbytes for output in self.captured)

    def close(self):
        self.closed = True
