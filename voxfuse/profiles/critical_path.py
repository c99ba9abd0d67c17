"""The critical path of one process: which device events and which host time the end of the window waited for.

Walked backwards. A device event that was launched while the one before it still ran waited for that one; else it waited
for its launch, and the path goes on along the host thread that made it. There the path runs back to the last call that
waited for the device (a synchronisation, a blocking copy), and from it to the event that this call waited for. The
event before is the one that ended last on the same device, whatever its stream: streams that wait for each other leave
no trace of it. Without device events the path is the busiest host thread.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from voxfuse.profiles.intervals import Intervals
from voxfuse.profiles.join import Joined
from voxfuse.profiles.nesting import NONE
from voxfuse.profiles.operations import is_sync


class Path(NamedTuple):
    """``device_us`` per device event, ``host`` intervals per lane; ``latency_us`` is what lies between the two: from
    the end of a launch call to its kernel's begin, and between kernels that follow each other. All of it adds up to the
    window, ``open_us`` included: what lies before the first event that could be followed back."""

    device_us: np.ndarray
    host: dict[int, Intervals]
    latency_us: float
    open_us: float


def critical_path(joined: Joined, window: tuple[float, float]) -> Path:
    """Walk back from the window's end to its begin."""
    return _Walk(joined, window).walk()


def busiest_lane(joined: Joined) -> int:
    """The host thread with the most launches, or without any with the most operations."""
    trace = joined.trace
    launching = joined.call[joined.call != NONE]
    lanes = trace.calls["lane"][launching] if len(launching) else trace.ops["lane"]
    return int(np.bincount(lanes).argmax()) if len(lanes) else 0


class _Walk:
    def __init__(self, joined: Joined, window: tuple[float, float]) -> None:
        trace = joined.trace
        self._first, self._last = window
        self._begin, self._end = trace.device.begin.tolist(), trace.device.end.tolist()
        self._call = joined.call.tolist()
        self._call_lane = trace.calls["lane"].tolist()
        self._call_begin, self._call_end = trace.calls.begin.tolist(), trace.calls.end.tolist()
        self._device = trace.device["device"].tolist()
        self._by_end: dict[int, tuple[list[float], list[int]]] = {}
        for device in np.unique(trace.device["device"]).tolist():
            rows = np.nonzero(trace.device["device"] == device)[0]
            rows = rows[np.argsort(trace.device.end[rows], kind="stable")]
            self._by_end[device] = trace.device.end[rows].tolist(), rows.tolist()
        self._waits = _waits(joined)
        self._lane = busiest_lane(joined)
        self._device_us = np.zeros(len(self._begin))
        self._host: dict[int, list[tuple[float, float]]] = {}
        self._latency = 0.0

    def walk(self) -> Path:
        time, lane, event = self._last, self._lane, NONE
        for _ in range(
            4 * (len(self._begin) + len(self._call_end)) + 16
        ):  # clocks that disagree must not go in circles
            if time <= self._first:
                break
            if event == NONE:
                time, event = self._along_host(time, lane)
                if event == NONE:
                    break
                continue
            begin = max(self._begin[event], self._first)
            end = min(self._end[event], time)
            self._latency += max(time - end, 0.0)
            if end > begin:
                self._device_us[event] += end - begin
            time = min(begin, time)
            call, before = self._call[event], self._before(event, time)
            launched = self._call_end[call] if call != NONE else -np.inf
            blocks = launched > self._begin[event]  # the call returned later: a copy that waits, or a slow call
            if before != NONE and self._end[before] > (self._call_begin[call] if blocks else launched):
                event = before
            elif call != NONE:
                lane = self._call_lane[call]
                self._latency += max(time - launched, 0.0)
                time, event = min(time, launched), NONE
            else:
                break
        host = {}
        for lane, pieces in self._host.items():
            begins, ends = zip(*pieces, strict=True)
            host[lane] = Intervals(np.array(begins), np.array(ends), (self._first, self._last))
        return Path(self._device_us, host, self._latency, max(time - self._first, 0.0))

    def _along_host(self, time: float, lane: int) -> tuple[float, int]:
        """Back along a host thread to the event that its last wait was for; the event is -1 at the window's begin."""
        ends, waits = self._waits.get(lane, ([], []))
        place = bisect_right(ends, time) - 1
        if place >= 0 and self._end[waits[place]] > self._first:
            event = waits[place]
            self._add_host(lane, min(self._end[event], time), time)
            return min(self._end[event], time), event
        self._add_host(lane, self._first, time)
        return self._first, NONE

    def _add_host(self, lane: int, begin: float, end: float) -> None:
        if end > begin:
            self._host.setdefault(lane, []).append((begin, end))

    def _before(self, event: int, time: float) -> int:
        """The event of the same device that ended last before a time."""
        ends, rows = self._by_end[self._device[event]]
        place = bisect_right(ends, time) - 1
        while place >= 0 and (rows[place] == event or self._begin[rows[place]] >= time):
            place -= 1  # itself and events without length
        return rows[place] if place >= 0 else NONE


def _waits(joined: Joined) -> dict[int, tuple[list[float], list[int]]]:
    """Per lane the ends of calls that waited for a device, and the event that each waited for.

    A call waited if a device event ended while it was under way and it is a synchronisation, or if its own event ended
    then (a copy that blocks).
    """
    trace = joined.trace
    order = np.argsort(trace.device.end, kind="stable")
    ends = trace.device.end[order]
    sync = np.array([is_sync(name) for name in trace.names], dtype=bool)
    waited: dict[int, list[tuple[float, int]]] = {}
    if not len(order):
        return {}
    lanes = trace.calls["lane"]
    for call in np.nonzero(sync[trace.calls["name"]])[0].tolist():
        place = int(np.searchsorted(ends, trace.calls.end[call], "right")) - 1
        if place >= 0 and ends[place] > trace.calls.begin[call]:
            waited.setdefault(int(lanes[call]), []).append((float(trace.calls.end[call]), int(order[place])))
    known = np.nonzero(joined.call != NONE)[0]
    calls = joined.call[known]
    blocking = (trace.device.end[known] <= trace.calls.end[calls]) & (trace.device["kind"][known] != 0)
    for event, call in zip(known[blocking].tolist(), calls[blocking].tolist(), strict=True):
        waited.setdefault(int(lanes[call]), []).append((float(trace.calls.end[call]), event))
    result = {}
    for lane, pairs in waited.items():
        pairs.sort()
        result[lane] = [end for end, _ in pairs], [event for _, event in pairs]
    return result
