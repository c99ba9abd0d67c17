"""What a trace held: devices, launches, how well events could be joined, and what to know before reading the rest."""

from __future__ import annotations

from collections import Counter

import numpy as np

from voxfuse.profiles.intervals import Intervals
from voxfuse.profiles.join import Joined
from voxfuse.profiles.nesting import NONE
from voxfuse.profiles.trace import KERNEL, Trace
from voxfuse.records import DeviceTime


def devices(trace: Trace, window: tuple[float, float]) -> tuple[DeviceTime, ...]:
    """Busy time of every device, as the union of what ran on it."""
    found = []
    for device in np.unique(trace.device["device"]).tolist() if len(trace.device) else ():
        rows = trace.device["device"] == device
        begin, end = trace.device.begin[rows], trace.device.end[rows]
        found.append(
            DeviceTime(
                device=str(device),
                busy_us=Intervals(begin, end, window).total,
                sum_us=float((np.clip(end, *window) - np.clip(begin, *window)).sum()),
                kernels=int((trace.device["kind"][rows] == KERNEL).sum()),
                streams=len(np.unique(trace.device["stream"][rows])),
            )
        )
    return tuple(found)


def launches(joined: Joined) -> dict[str, int]:
    """How many calls of each name put work on a device."""
    trace = joined.trace
    calls = np.unique(joined.call[joined.call != NONE])
    return dict(Counter(trace.names[name] for name in trace.calls["name"][calls].tolist()).most_common())


def events(joined: Joined) -> dict[str, int]:
    """How many events there were, and how far they could be joined."""
    trace = joined.trace
    return {
        **trace.counts,
        "device events": len(trace.device),
        "with their launch": int((joined.call != NONE).sum()),
        "in a chain": int((joined.chain != NONE).sum()),
        "in graph replays": joined.replayed,
        "replays joined with the mapping": joined.mapped,
        "operations": len(trace.ops),
    }


def notes(joined: Joined, busy: float, with_mapping: bool) -> list[str]:
    """What a reader of the report should know before its figures; ``busy`` is the GPU's share of the time."""
    trace, found = joined.trace, []
    if not len(trace.device):
        found.append(
            "no GPU in this trace: operations on the CPU stand for device work, Python between them for bubbles"
        )
    elif busy < 0.5:
        found.append(
            f"the GPU is busy for {busy:.0%} of the time: host-bound; fewer launches come before faster kernels"
        )
    orphans = int((joined.call == NONE).sum())
    if orphans:
        found.append(f"{orphans} of {len(trace.device)} device events have no launch in the trace: begun before it")
    if joined.replayed and not with_mapping:
        found.append(
            f"{joined.replayed} kernels are graph replays without operations: give a trace of the same work "
            "without graphs as --mapping"
        )
    if trace.counts["unreadable"] or trace.counts["unplaced"]:
        found.append(
            f"{trace.counts['unreadable'] + trace.counts['unplaced']} events lack a time or have fields of "
            "another type than torch writes: left out"
        )
    return found
