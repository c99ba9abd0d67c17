"""The graph runners of a fusion, one for each module that it served, beside the module."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from voxfuse.fusions._graph_arena import Arena, CudaArena
from voxfuse.fusions._weights import Weights
from voxfuse.fusions.buckets import Axes, Buckets
from voxfuse.fusions.graph_runner import CapturePolicy, GraphRunner
from voxfuse.kernels._op import Run


class Graphs(NamedTuple):
    """What the graphs of a module are: the call to capture (its ``run`` left out), the axes of its inputs, then of its
    output, and what ``GraphRunner`` takes by these names."""

    call: Callable[..., torch.Tensor]
    axes: tuple[Axes, ...]
    buckets: Buckets
    memory_cap_bytes: int
    weights: Callable[[nn.Module], Weights] = Weights


def _none_foreign(_: nn.Module) -> None:
    return None


def _ruled_out(
    foreign: Callable[[nn.Module], str | None], fault: Callable[[Any], str | None], module: nn.Module
) -> str | None:
    with torch.no_grad():  # asked of its structure
        return foreign(module) or fault(module)


class Beside(ABC):
    """The graph runners of one fusion. ``foreign`` says why a module is not upstream's own as it was tested, or None;
    asked before every capture, as is ``_fault``."""

    def __init__(
        self,
        run: Run,
        capture: CapturePolicy = "warmup",
        arena: Callable[[torch.device], Arena] = CudaArena,
        foreign: Callable[[nn.Module], str | None] = _none_foreign,
    ) -> None:
        self._run, self._capture, self._arena = run, capture, arena
        self.ruled_out = functools.partial(_ruled_out, foreign, self._fault)  # no reference back to here
        self._held: WeakKeyDictionary[nn.Module, GraphRunner] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @staticmethod
    @abstractmethod
    def _fault(module: Any) -> str | None:
        """What in a module rules its graphs out, asked of its structure."""

    @abstractmethod
    def _graphs(self, module: Any) -> Graphs:
        """What to capture of a module without fault."""

    def _runner(self, module: nn.Module) -> GraphRunner | str:
        with self._lock:
            held = self._held.get(module)
            if held is None:
                if (reason := self.ruled_out(module)) is not None:
                    return reason
                graphs = self._graphs(module)
                *inputs, output = graphs.axes
                held = self._held[module] = GraphRunner(
                    module,
                    functools.partial(graphs.call, run=self._run),
                    inputs,
                    output,
                    graphs.buckets,
                    memory_cap_bytes=graphs.memory_cap_bytes,
                    receipt=self._run.receipt,
                    capture=self._capture,
                    arena=self._arena,
                    weights=graphs.weights,
                    foreign=self.ruled_out,
                )
            return held
