"""Device events and the calls that launched them; graph replays and the chains that they were captured from.

All kernels of a CUDA graph share the correlation of one cudaGraphLaunch and have neither operation nor shape. A second
trace of the same work without graphs (``--mapping``) gives them both: replayed kernels are looked up in it by name and
order.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from voxfuse.profiles.marks import Context
from voxfuse.profiles.nesting import NONE, Chain, Nesting, nest
from voxfuse.profiles.operations import GRAPH_LAUNCH, is_library_kernel, short
from voxfuse.profiles.trace import KERNEL, NO_SIGNATURE, Trace


class Joined(NamedTuple):
    """``call`` and ``chain`` are per device event (-1: none); ``chains`` those of the nesting and of replays."""

    trace: Trace
    nesting: Nesting
    call: np.ndarray
    chain: np.ndarray
    chains: list[Chain]
    chain_of_unit: np.ndarray
    replayed: int
    mapped: int


def join(trace: Trace, mapping: Joined | None = None) -> Joined:
    """Join a trace; replayed kernels with the chains of ``mapping``, which must have been taken without graphs."""
    call = calls_of(trace)
    kernel_of_call = np.full(len(trace.calls), NONE)
    order = np.argsort(-trace.device.begin, kind="stable")  # the first kernel is written last
    known = order[call[order] != NONE]
    kernel_of_call[call[known]] = trace.device["name"][known]
    nesting = nest(trace, kernel_of_call)
    unit = np.where(call == NONE, NONE, nesting.unit_of_call[call])
    chain = np.where(unit == NONE, NONE, _take(nesting.chain_of_unit, unit))
    chains = list(nesting.chains)
    graph_call = np.array([GRAPH_LAUNCH.match(name) is not None for name in trace.names])
    replays = np.zeros(len(call), dtype=bool)
    launched = call != NONE
    replays[launched] = graph_call[trace.calls["name"][call[launched]]]
    replayed = np.nonzero(replays)[0]
    mapped = _place_replays(trace, nesting, call, chain, chains, replayed, mapping)
    return Joined(trace, nesting, call, chain, chains, nesting.chain_of_unit, len(replayed), mapped)


def calls_of(trace: Trace) -> np.ndarray:
    """Per device event the call with its correlation, in ``cuda_runtime`` or ``cuda_driver``, or -1.

    Where several calls have one correlation (files put together from several processes, or a writer that numbers
    nothing), the last that began before the event.
    """
    calls, events = len(trace.calls), len(trace.device)
    correlation = np.concatenate([trace.calls["correlation"], trace.device["correlation"]])
    begin = np.concatenate([trace.calls.begin, trace.device.begin])
    order = np.lexsort((np.arange(calls + events), begin, correlation))  # calls before events that begin with them
    places = np.where(order < calls, np.arange(calls + events), NONE)
    before, behind = np.maximum.accumulate(places), np.full(calls + events, calls + events - 1)
    behind[places != NONE] = places[places != NONE]
    behind = np.minimum.accumulate(behind[::-1])[::-1]
    found = np.full(events, NONE)
    for nearest in (behind, before):  # a call behind its event, by clocks that disagree, counts where none is before
        call = order[np.maximum(nearest, 0)]
        fits = (call < calls) & (correlation[call] == correlation[order]) & (nearest != NONE) & (order >= calls)
        found[order[fits] - calls] = call[fits]
    found[trace.device["correlation"] == -1] = NONE
    return found


def _take(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    return values[index] if len(values) else np.full(len(index), NONE)


def _place_replays(
    trace: Trace,
    nesting: Nesting,
    call: np.ndarray,
    chain: np.ndarray,
    chains: list[Chain],
    replayed: np.ndarray,
    mapping: Joined | None,
) -> int:
    """Give replayed kernels chains of their own, by the mapping where it has them; returns how many it had."""
    mapped = 0
    if not len(replayed):
        return mapped
    replayed = replayed[np.lexsort((trace.device.begin[replayed], call[replayed]))]
    bounds = np.nonzero(np.diff(call[replayed], prepend=-2, append=-2))[0]
    names, kind = trace.device["name"], trace.device["kind"]
    library = Library(mapping) if mapping is not None else None
    contexts = {context: number for number, context in enumerate(nesting.contexts)}
    signatures: dict[int, int] = {}  # of the mapping → here
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        events = replayed[first:last].tolist()
        context = int(nesting.context_of_call[call[events[0]]])
        kernels = [event for event in events if kind[event] == KERNEL]
        placed: dict[int, int] = {}  # chain of the mapping → chain of this replay
        found = library.find([trace.names[names[event]] for event in kernels]) if library else {}
        for position, there in found.items():
            number = placed.get(there)
            if number is None:
                number = placed[there] = len(chains)
                chains.append(_moved(trace, mapping, there, nesting, contexts, context, signatures))
            chain[kernels[position]] = number
        mapped += len(found)
        rest = (
            [event for event in events if event not in {kernels[position] for position in found}] if found else events
        )
        _chains_by_kernel(trace, chain, chains, rest, context)
    return mapped


def _moved(
    trace: Trace,
    mapping: Joined | None,
    number: int,
    nesting: Nesting,
    contexts: dict[Context, int],
    here: int,
    signatures: dict[int, int],
) -> Chain:
    """A chain of the mapping trace in this trace's numbers; its stage is that of the replay where that is marked."""
    assert mapping is not None
    chain = mapping.chains[number]
    context = mapping.nesting.contexts[chain.context]
    if nesting.contexts[here].stage and not context.own:
        context = context._replace(stage=nesting.contexts[here].stage)
    if context not in contexts:
        contexts[context] = len(nesting.contexts)
        nesting.contexts.append(context)
    signature = chain.signature
    if signature != NO_SIGNATURE:
        if signature not in signatures:
            signatures[signature] = len(trace.signatures)
            trace.signatures.append(mapping.trace.signatures[signature])
        signature = signatures[signature]
    return Chain(contexts[context], chain.operations, signature)


def _chains_by_kernel(trace: Trace, chain: np.ndarray, chains: list[Chain], events: list[int], context: int) -> None:
    """Chains of replayed kernels by their names alone: each library kernel is one, what lies between them another."""
    names = trace.device["name"]
    members: list[int] = []

    def finish() -> None:
        if members:
            operations = tuple(f"kernel:{short(trace.names[names[event]])}" for event in members)
            chain[members] = len(chains)
            chains.append(Chain(context, operations, NO_SIGNATURE))
            members.clear()

    for event in events:
        if is_library_kernel(trace.names[names[event]]):
            finish()
            members.append(event)
            finish()
        else:
            members.append(event)
            if len(members) == 32:
                finish()
    finish()


class Library:
    """The kernels of a mapping trace in the order of their launches, to look replays up in."""

    def __init__(self, mapping: Joined) -> None:
        trace = mapping.trace
        known = np.nonzero((mapping.chain != NONE) & (trace.device["kind"] == KERNEL))[0]
        order = known[np.argsort(trace.calls.begin[mapping.call[known]], kind="stable")]
        self._chains = mapping.chain[order].tolist()
        self._places: dict[str, list[int]] = {}
        self._known: dict[tuple[str, ...], dict[int, int]] = {}  # replays of one graph are alike
        for place, name in enumerate(trace.device["name"][order].tolist()):
            self._places.setdefault(trace.names[name], []).append(place)

    def find(self, names: list[str]) -> dict[int, int]:
        """Where the kernels of a replay come from, looked up once for each sequence of names."""
        key = tuple(names)
        if key not in self._known:
            self._known[key] = self._find(names)
        return self._known[key]

    def _find(self, names: list[str]) -> dict[int, int]:
        """Position in a replay → chain of the mapping, for kernels that follow each other here as they do there.

        From each place where the first kernel of the replay stands in the mapping, every further kernel is looked for
        behind the one before; the place that finds the most in the shortest stretch counts.
        """
        best: dict[int, int] = {}
        shortest = 0
        anchor = next((position for position, name in enumerate(names) if name in self._places), None)
        if anchor is None:
            return best
        starts = self._places[names[anchor]]
        for start in starts[:: max(1, len(starts) // 16)]:
            found, place = {anchor: self._chains[start]}, start
            for position in range(anchor + 1, len(names)):
                places = self._places.get(names[position])
                if places is None:
                    continue
                following = bisect_left(places, place + 1)
                if following < len(places) and places[following] - place <= len(names):
                    place = places[following]
                    found[position] = self._chains[place]
            stretch = place - start
            if len(found) > len(best) or (len(found) == len(best) and stretch < shortest):
                best, shortest = found, stretch
            if len(best) == len(names) and shortest == len(names) - 1:
                break
        return best
