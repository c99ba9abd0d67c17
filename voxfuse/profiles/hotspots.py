"""Hotspots of one trace: chains of operations, added up over calls, with what fusing each could give end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from voxfuse.profiles import matching
from voxfuse.profiles.critical_path import Path
from voxfuse.profiles.intervals import Intervals, totals
from voxfuse.profiles.join import Joined
from voxfuse.profiles.nesting import NONE, PYTHON, STATES, Timeline
from voxfuse.profiles.operations import GRAPH_LAUNCH
from voxfuse.records import Hotspot
from voxfuse.records.profile import ceiling

LEAST_SHARE = 1e-4  # of the critical path and of busy time: what is below is added up, not listed
MOST = 200


class Key(NamedTuple):
    """What makes two chains one hotspot; shapes do not."""

    stage: str
    module: str
    classes: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass
class Sums:
    """Figures per chain of a trace, all in µs but the counts."""

    device: np.ndarray
    host: np.ndarray
    launches: np.ndarray
    path_device: np.ndarray
    path_host: np.ndarray


def sums_per_chain(joined: Joined, path: Path, window: tuple[float, float]) -> Sums:
    """Add up device, host and critical-path time of every chain."""
    trace, count = joined.trace, len(joined.chains)
    lengths = np.clip(trace.device.end, *window) - np.clip(trace.device.begin, *window)
    placed = joined.chain != NONE
    device = totals(joined.chain[placed], lengths[placed], count)
    path_device = totals(joined.chain[placed], path.device_us[placed], count)
    units = joined.chain_of_unit != NONE
    host = totals(joined.chain_of_unit[units], joined.nesting.host_us[units], count)
    launching = np.unique(joined.call[joined.call != NONE])
    unit = joined.nesting.unit_of_call[launching]
    unit = unit[unit != NONE]
    launches = np.bincount(joined.chain_of_unit[unit], minlength=count) if len(unit) else np.zeros(count)
    path_host = np.zeros(count)
    for lane, intervals in path.host.items():
        timeline = joined.nesting.timelines[lane]
        measured = measure(timeline, intervals)
        rows = timeline.unit != NONE
        if not len(trace.device):
            working = rows & (timeline.state != PYTHON)
            path_device += _per_chain(joined, timeline, measured, working, count)
            rows &= timeline.state == PYTHON
        path_host += _per_chain(joined, timeline, measured, rows, count)
    if not len(trace.device):
        device = host
    return Sums(device, host, launches.astype(np.int64), path_device, path_host)


def _per_chain(joined: Joined, timeline: Timeline, measured: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Add up pieces of a timeline that belong to units by the chains of those."""
    chain = joined.chain_of_unit[timeline.unit[rows]]
    known = chain != NONE
    return totals(chain[known], measured[rows][known], count)


def measure(timeline: Timeline, intervals: Intervals) -> np.ndarray:
    """How much of each piece of a host thread's timeline the intervals cover."""
    if not len(timeline.times):
        return np.zeros(0)
    return intervals.measure(timeline.times, np.concatenate([timeline.times[1:], [np.inf]]))


def by_state_and_context(timeline: Timeline, measured: np.ndarray) -> dict[tuple[int, int], float]:
    """Add up measured pieces by what the host did and where in the model."""
    if not len(measured):
        return {}
    keys = timeline.context * len(STATES) + timeline.state
    added = np.bincount(keys, measured)
    return {(key % len(STATES), key // len(STATES)): float(added[key]) for key in np.nonzero(added)[0].tolist()}


def find_hotspots(
    joined: Joined,
    sums: Sums,
    *,
    stack: str,
    wall_us: float,
    busy_us: float,
    stage_path_us: dict[str, float],
    noise: float,
) -> tuple[tuple[Hotspot, ...], tuple[str, ...]]:
    """The hotspots of a trace, largest share of the critical path first, and notes about what is left out."""
    groups: dict[Key, list[int]] = {}
    contexts = joined.nesting.contexts
    for number, chain in enumerate(joined.chains):
        context = contexts[chain.context]
        groups.setdefault(Key(context.stage, context.module, context.classes, chain.operations), []).append(number)
    found = []
    rest = idle = 0.0
    for key, members in groups.items():
        rows = np.array(members)
        device, on_path = float(sums.device[rows].sum()), float((sums.path_device + sums.path_host)[rows].sum())
        if not key.operations:
            idle += on_path
            continue
        if max(device / max(busy_us, 1e-9), on_path / wall_us) < LEAST_SHARE:
            rest += on_path
            continue
        found.append((on_path, key, rows))
    found.sort(key=lambda item: (-item[0], item[1]))
    rest += sum(on_path for on_path, _, _ in found[MOST:])
    hotspots = tuple(
        _hotspot(joined, sums, key, rows, stack, wall_us, busy_us, stage_path_us, noise)
        for _, key, rows in found[:MOST]
    )
    return hotspots, tuple(
        f"{share / wall_us:.1%} of the critical path is in {what}"
        for share, what in (
            (rest, "chains too small to be listed"),
            (idle, "operations that put nothing on the device"),
        )
        if share / wall_us > LEAST_SHARE
    )


def _hotspot(
    joined: Joined,
    sums: Sums,
    key: Key,
    rows: np.ndarray,
    stack: str,
    wall_us: float,
    busy_us: float,
    stage_path_us: dict[str, float],
    noise: float,
) -> Hotspot:
    device, host = float(sums.device[rows].sum()), float(sums.host[rows].sum())
    path_host = float(sums.path_host[rows].sum())
    path = float(sums.path_device[rows].sum()) + path_host
    by_signature: dict[int, float] = {}
    for row in rows.tolist():
        signature = joined.chains[row].signature
        by_signature[signature] = by_signature.get(signature, 0.0) + float(sums.device[row])
    signature = joined.trace.signature(max(by_signature, key=lambda number: by_signature[number]))
    share, host_share, busy = path / wall_us, path_host / wall_us, device / max(busy_us, 1e-9)
    launches = int(sums.launches[rows].sum())
    fusions, reason = _match(key, signature, stack, ceiling(share), noise)
    return Hotspot(
        stack=stack,
        stage=key.stage,
        module=key.module,
        module_class=key.classes[-1] if key.classes else "",
        operation=" + ".join(key.operations),
        operations=key.operations,
        signature=signature,
        signatures=len(by_signature),
        calls=len(rows),
        gpu_us=device,
        host_us=host,
        launches=launches,
        busy_share=busy,
        wall_share=device / wall_us,
        critical_path_share=share,
        host_critical_share=host_share,
        amdahl_ceiling=ceiling(share),
        stage_ceiling=ceiling(path / stage_path_us[key.stage]) if stage_path_us.get(key.stage) else 1.0,
        fusions=fusions,
        reason=reason,
        advice=_advice(joined, share, host_share, busy, launches / len(rows), noise),
    )


def _match(key: Key, signature: tuple, stack: str, gain: float, noise: float) -> tuple[tuple[str, ...], str | None]:
    """The fusions of a hotspot and the reason of its outcome (None where a fusion simply matches)."""
    running = matching.running(key.operations, stack)
    if running:
        return running, f"{matching.RUNS}: {', '.join(matching.own_kernels(key.operations))}"
    fusions = matching.matches(key.operations, key.classes, signature, stack)
    if fusions:
        return fusions, None
    foreign = matching.foreign_kernels(key.operations)
    if foreign:
        return (), f"{matching.DEFERRED} ({', '.join(foreign)})"
    if gain <= 1 + noise:
        return (), matching.BELOW_NOISE
    if all(GRAPH_LAUNCH.match(name) for name in key.operations):
        return (), matching.GRAPH
    return (), f"{matching.UNMATCHED}: {' + '.join(key.operations)}"


def _advice(joined: Joined, share: float, host_share: float, busy: float, launches: float, noise: float) -> str | None:
    """What would help, where a faster kernel would not."""
    if not len(joined.trace.device) or max(share, busy) <= noise:
        return None
    if host_share > noise and host_share > share - host_share:
        return (
            f"the GPU idles here while the host dispatches: {host_share:.1%} of the critical path against "
            f"{share - host_share:.1%} in kernels; fewer launches ({launches:.1f} a call) or a captured graph help, "
            "a faster kernel does not"
        )
    if share <= noise:
        return "off the critical path: the GPU is busy with this while nothing waits for it"
    return None
