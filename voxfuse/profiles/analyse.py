"""From trace files to a report: each process by itself, its runtime tree, critical path, stages and hotspots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from voxfuse.profiles.components import component_of
from voxfuse.profiles.critical_path import Path as CriticalPath
from voxfuse.profiles.critical_path import busiest_lane, critical_path
from voxfuse.profiles.hotspots import by_state_and_context, find_hotspots, measure, sums_per_chain
from voxfuse.profiles.intervals import Intervals, newly_covered
from voxfuse.profiles.join import Joined, join
from voxfuse.profiles.nesting import NONE, PYTHON, STATES
from voxfuse.profiles.steady import require_steady
from voxfuse.profiles.summary import devices, events, launches, notes
from voxfuse.profiles.trace import KERNEL, Notify, Trace, load
from voxfuse.records import ProcessProfile, StageTime
from voxfuse.records.profile import ceiling

NOISE = 0.01  # of end-to-end time; what a gate can tell apart lies above it
BINS = 300  # of a timeline
COPY, QUEUE, BUBBLES = "copy", "queue", "bubbles"


class Spans(NamedTuple):
    """Per device event what it adds to the union of busy time (µs), and its context."""

    exclusive: np.ndarray
    context: np.ndarray


def analyse_files(
    paths: Sequence[Path],
    *,
    stack: str = "",
    mapping: Path | None = None,
    noise: float = NOISE,
    components: Mapping[str, str] | None = None,
    notify: Notify = lambda _: None,
) -> tuple[ProcessProfile, ...]:
    """Analyse traces of one or several processes. Raises TraceError for what is no steady trace, OSError."""
    joined_mapping = None
    if mapping is not None:
        mapped = load(mapping, notify)
        require_steady(mapped)
        joined_mapping = join(mapped)
    return tuple(
        analyse(load(path, notify), stack=stack, mapping=joined_mapping, noise=noise, components=components or {})
        for path in paths
    )


def analyse(
    trace: Trace, *, stack: str, mapping: Joined | None, noise: float, components: Mapping[str, str]
) -> ProcessProfile:
    """Analyse one trace. Raises TraceError where it is not steady."""
    require_steady(trace)
    joined = join(trace, mapping)
    window = _window(joined)
    wall = window[1] - window[0]
    path = critical_path(joined, window) if len(trace.device) else _host_path(joined, window)
    spans = _spans(joined, window)
    busy = Intervals(trace.device.begin, trace.device.end, window) if len(trace.device) else _host_busy(joined, window)
    requests = joined.nesting.requests
    begins, ends = zip(*(requests or [window]), strict=True)
    asked = Intervals(np.array(begins), np.array(ends), window)
    gaps = busy.gaps(window)
    bubbles = gaps.within(asked)
    idle = _host_time(joined, _idle_per_lane(joined, bubbles))
    stages, stage_path = _stages(joined, path, spans, idle, wall, components, window)
    tree: dict[str, float] = defaultdict(float)
    for stage in stages:
        tree[stage.component] += stage.gpu_us
        tree[COPY] += stage.copy_us
    tree[QUEUE] = gaps.total - bubbles.total
    tree[BUBBLES] = bubbles.total
    sums = sums_per_chain(joined, path, window)
    hotspots, rest = find_hotspots(
        joined, sums, stack=stack, wall_us=wall, busy_us=busy.total, stage_path_us=stage_path, noise=noise
    )
    return ProcessProfile(
        trace=trace.label,
        device="gpu" if len(trace.device) else "cpu",
        wall_us=wall,
        steps=len(requests) or None,
        tree=dict(tree),
        bubbles=_by_state(idle),
        path=_path_parts(joined, path),
        devices=devices(trace, window),
        stages=stages,
        launches=launches(joined),
        events=events(joined),
        hotspots=hotspots,
        timeline=_timeline(joined, spans, components, window),
        notes=(*notes(joined, busy.total / wall, mapping is not None), *rest),
    )


def _ends(window: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([window[0]]), np.array([window[1]])


def _window(joined: Joined) -> tuple[float, float]:
    """From the first request to the end of the last; without requests from the first event to the last."""
    trace, requests = joined.trace, joined.nesting.requests
    if requests:
        return min(begin for begin, _ in requests), max(end for _, end in requests)
    parts = [part for part in (trace.device, trace.ops, trace.calls) if len(part)]
    first, last = min(float(part.begin.min()) for part in parts), max(float(part.end.max()) for part in parts)
    return first, max(last, first + 1e-3)


def _spans(joined: Joined, window: tuple[float, float]) -> Spans:
    """Without a device, the pieces of the busiest host thread that are inside operations stand for its events."""
    trace = joined.trace
    if not len(trace.device):
        timeline = joined.nesting.timelines[busiest_lane(joined)]
        measured = measure(timeline, Intervals(*_ends(window), window))
        working = timeline.state != PYTHON
        return Spans(measured[working], timeline.context[working])
    order = np.argsort(trace.device.begin, kind="stable")
    begin, end = np.clip(trace.device.begin[order], *window), np.clip(trace.device.end[order], *window)
    exclusive = np.zeros(len(order))
    exclusive[order] = newly_covered(begin, end)
    return Spans(exclusive, _contexts(joined))


def _timeline(
    joined: Joined, spans: Spans, components: Mapping[str, str], window: tuple[float, float]
) -> dict[str, tuple[float, ...]]:
    """The busy share of each bin of the window by component."""
    edges = np.linspace(*window, BINS + 1)
    by_context = [component_of(context.stage, components) for context in joined.nesting.contexts]
    component = np.array(by_context)[spans.context]
    if len(joined.trace.device):
        begin, end = joined.trace.device.begin, joined.trace.device.end
        component = np.where(joined.trace.device["kind"] == KERNEL, component, COPY)
    else:
        timeline = joined.nesting.timelines[busiest_lane(joined)]
        working = timeline.state != PYTHON
        begin = timeline.times[working]
        end = np.concatenate([timeline.times[1:], [window[1]]])[working]
    shares = {}
    for name in np.unique(component).tolist():
        rows = component == name
        covered = Intervals(begin[rows], end[rows], window).measure(edges[:-1], edges[1:])
        shares[name] = tuple(np.round(covered / np.diff(edges), 4).tolist())
    return shares


def _contexts(joined: Joined) -> np.ndarray:
    """Per device event its context: its chain's, else that of its launch, else none."""
    of_chain = np.array([chain.context for chain in joined.chains] or [0], dtype=np.int64)
    by_call = np.zeros(len(joined.call), dtype=np.int64)
    known = joined.call != NONE
    by_call[known] = joined.nesting.context_of_call[joined.call[known]]
    return np.where(joined.chain == NONE, by_call, of_chain[np.maximum(joined.chain, 0)])


def _host_busy(joined: Joined, window: tuple[float, float]) -> Intervals:
    timeline = joined.nesting.timelines[busiest_lane(joined)]
    end = np.concatenate([timeline.times[1:], [window[1]]])
    working = timeline.state != PYTHON
    return Intervals(timeline.times[working], end[working], window)


def _host_path(joined: Joined, window: tuple[float, float]) -> CriticalPath:
    return CriticalPath(np.zeros(0), {busiest_lane(joined): Intervals(*_ends(window), window)}, 0.0, 0.0)


def _idle_per_lane(joined: Joined, idle: Intervals) -> dict[int, Intervals]:
    """Each gap on the host thread that ends it: the one that launched the device's next event."""
    trace = joined.trace
    lane = np.full(len(idle.begin), busiest_lane(joined))
    if len(trace.device) and len(lane):
        order = np.argsort(trace.device.begin, kind="stable")
        following = np.searchsorted(trace.device.begin[order], idle.end - 1e-6)
        call = joined.call[order[np.minimum(following, len(order) - 1)]]
        known = (following < len(order)) & (call != NONE)
        lane[known] = trace.calls["lane"][call[known]]
    bounds = (-np.inf, np.inf)
    return {
        number: Intervals(idle.begin[lane == number], idle.end[lane == number], bounds) for number in set(lane.tolist())
    }


def _host_time(joined: Joined, per_lane: Mapping[int, Intervals]) -> dict[tuple[int, int], float]:
    """What host threads did in their intervals: µs by (state, context)."""
    total: dict[tuple[int, int], float] = defaultdict(float)
    for lane, intervals in per_lane.items():
        timeline = joined.nesting.timelines[lane]
        measured = measure(timeline, intervals)
        for key, value in by_state_and_context(timeline, measured).items():
            total[key] += value
        total[PYTHON, 0] += intervals.total - float(measured.sum())  # before the thread's first event
    return dict(total)


def _by_state(times: Mapping[tuple[int, int], float]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for (state, _), value in times.items():
        total[STATES[state]] += value
    return dict(total)


def _stages(
    joined: Joined,
    path: CriticalPath,
    spans: Spans,
    idle: Mapping[tuple[int, int], float],
    wall: float,
    components: Mapping[str, str],
    window: tuple[float, float],
) -> tuple[tuple[StageTime, ...], dict[str, float]]:
    """Every stage's share of time, and its µs on the critical path."""
    trace, names = joined.trace, [context.stage for context in joined.nesting.contexts]
    gpu, copy, on_path, launches = (defaultdict[str, float](float) for _ in range(4))
    waits: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(counter: dict[str, float], context: np.ndarray, values: np.ndarray) -> None:
        for number, value in enumerate(np.bincount(context, values, minlength=1).tolist()):
            if value:
                counter[names[number]] += value

    kernels = trace.device["kind"] == KERNEL if len(trace.device) else np.ones(len(spans.exclusive), dtype=bool)
    add(gpu, spans.context[kernels], spans.exclusive[kernels])
    add(copy, spans.context[~kernels], spans.exclusive[~kernels])
    if len(trace.device):
        add(on_path, spans.context, path.device_us)
        calls = np.unique(joined.call[joined.call != NONE])
        add(launches, joined.nesting.context_of_call[calls], np.ones(len(calls)))
    for (_, context), value in _host_time(joined, path.host).items():
        on_path[names[context]] += value
    for (state, context), value in idle.items():
        waits[names[context]][STATES[state]] += value
    found = dict.fromkeys((*gpu, *copy, *waits, *on_path))
    stages = tuple(
        StageTime(
            name=name,
            component=component_of(name, components),
            gpu_us=gpu[name],
            copy_us=copy[name],
            idle_us=dict(waits[name]),
            launches=int(launches[name]),
            critical_path_share=min(on_path[name] / wall, 1.0),
            amdahl_ceiling=ceiling(on_path[name] / wall),
        )
        for name in sorted(found, key=lambda name: -on_path[name])
    )
    return stages, dict(on_path)


def _path_parts(joined: Joined, path: CriticalPath) -> dict[str, float]:
    """The critical path by what it consists of; adds up to the window."""
    host = _by_state(_host_time(joined, path.host))
    parts = {"kernels and copies": float(path.device_us.sum())} if len(joined.trace.device) else {}
    parts |= {f"host: {state}": value for state, value in host.items()}
    return parts | {"launch latency": path.latency_us, "not followed back": path.open_us}
