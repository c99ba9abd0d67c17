"""What encloses what on each host thread: units of work, the chains that they form, and what the host does when.

A *unit* is an operation called by the model's code (not by another operation), or a kernel launched without any, as
Triton does. A *chain* is a run of units of one module call with no call of an inner module and no library operation
(convolution, matrix product, …) between them: what one kernel could replace. Views join the chain around them.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from voxfuse.profiles.marks import REQUEST, Context, enter
from voxfuse.profiles.operations import (
    GRAPH_LAUNCH,
    is_launch,
    is_library_op,
    is_sync,
    is_view,
    moves_data,
    short,
)
from voxfuse.profiles.trace import NO_SIGNATURE, Trace

PYTHON, DISPATCH, LAUNCH, SYNC = 0, 1, 2, 3
STATES = ("python", "dispatch", "launch calls", "synchronisation")
LONGEST_CHAIN = 32
_MARK, _OP, _CALL = 0, 1, 2
NONE = -1


class Chain(NamedTuple):
    """One run of a chain: its context, operations, and the signature of the first of them."""

    context: int
    operations: tuple[str, ...]
    signature: int


class Timeline(NamedTuple):
    """What one host thread does: from ``times[i]`` to ``times[i + 1]`` it is in a state, for a unit, in a context."""

    times: np.ndarray
    state: np.ndarray
    unit: np.ndarray
    context: np.ndarray


class Nesting:
    """The result. ``unit_of_call`` and ``context_of_call`` are per runtime call, ``chain_of_unit`` per unit."""

    def __init__(self, trace: Trace) -> None:
        self.contexts: list[Context] = [Context()]
        self.chains: list[Chain] = []
        self.unit_of_call = np.full(len(trace.calls), NONE)
        self.context_of_call = np.zeros(len(trace.calls), dtype=np.int64)
        self.chain_of_unit = np.empty(0, dtype=np.int64)
        self.host_us = np.empty(0)  # per unit
        self.timelines: dict[int, Timeline] = {}
        self.requests: list[tuple[float, float]] = []


def nest(trace: Trace, kernel_of_call: np.ndarray) -> Nesting:
    """Sort a trace's marks, operations and calls into each other.

    ``kernel_of_call``: the name of the first kernel, copy or fill that each call put on a device, or -1.
    """
    parts = (trace.marks, trace.ops, trace.calls)
    begin = np.concatenate([part.begin for part in parts])
    end = np.concatenate([part.end for part in parts])
    lane = np.concatenate([part["lane"] for part in parts])
    name = np.concatenate([part["name"] for part in parts])
    kind = np.repeat((_MARK, _OP, _CALL), [len(part) for part in parts])
    index = np.concatenate([np.arange(len(part)) for part in parts])
    order = np.lexsort((kind, -end, begin, lane))
    nesting = Nesting(trace)
    sweep = _Sweep(trace, nesting, kernel_of_call)
    bounds = np.searchsorted(lane[order], np.arange(len(trace.lanes) + 1))
    for number in range(len(trace.lanes)):
        rows = order[bounds[number] : bounds[number + 1]]
        columns = (begin[rows], end[rows], kind[rows], index[rows], name[rows])
        nesting.timelines[number] = sweep.run(*(column.tolist() for column in columns))
    nesting.chain_of_unit = np.array(sweep.chain_of_unit, dtype=np.int64)
    nesting.host_us = np.array(sweep.host_us)
    return nesting


class _Sweep:
    """One pass over a lane's ranges, by their begins, with the open ones on a stack."""

    def __init__(self, trace: Trace, nesting: Nesting, kernel_of_call: np.ndarray) -> None:
        self._names, self._nesting = trace.names, nesting
        self._kernel_of_call = kernel_of_call.tolist()
        self._driver = trace.calls["driver"].tolist()
        self._signature = trace.ops["signature"].tolist()
        self._on_gpu = len(trace.device) > 0
        self._context_numbers: dict[Context, int] = {Context(): 0}
        self._inside: dict[tuple[int, int], int] = {}  # (mark's name, outer context) → context
        self.chain_of_unit: list[int] = []
        self.host_us: list[float] = []

    def run(self, begins: list, ends: list, kinds: list, indices: list, names: list) -> Timeline:
        """Sweep one lane."""
        self._times, self._states, self._units, self._contexts = array("d"), array("b"), array("q"), array("q")
        self._open: list[tuple[float, int, int, int, int]] = []  # end, state, unit, context, kind
        self._chain: list[str] = []
        self._members: list[int] = []
        self._chain_signature = NO_SIGNATURE
        self._tops: dict[int, list] = {}  # open units: operation, signature, whether it computes anything
        self._last = NONE  # unit whose Python follows
        for begin, end, kind, index, name in zip(begins, ends, kinds, indices, names, strict=True):
            self._close(begin)
            if self._open and end > self._open[-1][0]:
                end = self._open[-1][0]  # clocks disagree by less than a µs: nesting is what counts
            outer_unit, context = (self._open[-1][2], self._open[-1][3]) if self._open else (NONE, 0)
            if kind == _MARK:
                self._enter(begin, end, name, context)
            elif kind == _OP:
                self._enter_op(begin, end, index, name, outer_unit, context)
            else:
                self._enter_call(begin, end, index, name, outer_unit, context)
        self._close(float("inf"))
        self._finish_chain(0)
        columns = (self._states, self._units, self._contexts)
        return Timeline(np.frombuffer(self._times), *(np.array(column, dtype=np.int64) for column in columns))

    def _enter(self, begin: float, end: float, name: int, context: int) -> None:
        inside = self._inside.get((name, context))
        if inside is None:
            entered = enter(self._names[name], self._nesting.contexts[context])
            inside = context if entered is None else self._context(entered)
            self._inside[name, context] = inside
        if self._names[name].startswith(REQUEST):
            self._nesting.requests.append((begin, end))
        if inside != context:
            self._finish_chain(context)
            self._last = NONE
        self._push(begin, end, PYTHON, NONE, inside, _MARK)

    def _enter_op(self, begin: float, end: float, index: int, name: int, outer_unit: int, context: int) -> None:
        text = self._names[name]
        if outer_unit == NONE:
            unit = self._new_unit(end - begin)
            works = not self._on_gpu and not is_view(text)
            self._tops[unit] = [text, self._signature[index], works]
        else:
            unit = outer_unit
            if not self._on_gpu and moves_data(text) and unit in self._tops:
                self._tops[unit][2] = True
        self._push(begin, end, DISPATCH, unit, context, _OP)

    def _enter_call(self, begin: float, end: float, index: int, name: int, outer_unit: int, context: int) -> None:
        kernel, text = self._kernel_of_call[index], self._names[name]
        unit = outer_unit
        if outer_unit == NONE and kernel != NONE:
            unit = self._new_unit(end - begin)
            if GRAPH_LAUNCH.match(text):
                self._finish_chain(context)
                self._join(unit, text, NO_SIGNATURE, context)
                self._finish_chain(context)
            else:
                prefix = "triton:" if self._driver[index] else "kernel:"
                self._join(unit, prefix + short(self._names[kernel]), NO_SIGNATURE, context)
        elif kernel != NONE and outer_unit in self._tops:
            self._tops[outer_unit][2] = True
        self._nesting.unit_of_call[index] = unit
        self._nesting.context_of_call[index] = context
        state = SYNC if is_sync(text) else LAUNCH if kernel != NONE or is_launch(text) else DISPATCH
        self._push(begin, end, state, unit, context, _CALL)

    def _push(self, begin: float, end: float, state: int, unit: int, context: int, kind: int) -> None:
        self._open.append((end, state, unit, context, kind))
        self._piece(begin, state, unit, context)

    def _close(self, until: float) -> None:
        """Close what ends before a time."""
        while self._open and self._open[-1][0] <= until:
            end, _, unit, context, kind = self._open.pop()
            outer = self._open[-1] if self._open else (end, PYTHON, NONE, 0, _MARK)
            if kind == _OP and outer[2] == NONE:
                text, signature, works = self._tops.pop(unit)
                self._last = unit
                if works:
                    self._join(unit, short(text), signature, context, is_library_op(text))
                else:
                    self._members.append(unit)
            elif kind == _MARK and outer[3] != context:
                self._finish_chain(context)
                self._last = NONE
            elif kind == _CALL and outer[2] == NONE and unit != NONE:
                self._last = unit
            after = self._last if outer[1] == PYTHON else outer[2]
            self._piece(end, outer[1], after, outer[3])

    def _join(self, unit: int, operation: str, signature: int, context: int, alone: bool = False) -> None:
        """Let a unit join the chain under way; a library operation ends it and is a chain of its own."""
        if (alone and self._chain) or len(self._chain) == LONGEST_CHAIN:
            self._finish_chain(context)
        if not self._chain:
            self._chain_signature = signature
        self._chain.append(operation)
        self._members.append(unit)
        if alone:
            self._finish_chain(context)

    def _finish_chain(self, context: int) -> None:
        if self._members:
            number = len(self._nesting.chains)
            self._nesting.chains.append(Chain(context, tuple(self._chain), self._chain_signature))
            for unit in self._members:
                self.chain_of_unit[unit] = number
        self._chain, self._members, self._chain_signature = [], [], NO_SIGNATURE

    def _new_unit(self, host_us: float) -> int:
        self.chain_of_unit.append(NONE)
        self.host_us.append(host_us)
        return len(self.chain_of_unit) - 1

    def _piece(self, at: float, state: int, unit: int, context: int) -> None:
        self._times.append(at)
        self._states.append(state)
        self._units.append(unit)
        self._contexts.append(context)

    def _context(self, context: Context) -> int:
        number = self._context_numbers.get(context)
        if number is None:
            number = self._context_numbers[context] = len(self._nesting.contexts)
            self._nesting.contexts.append(context)
        return number
