"""The paired timer: arms interleaved in one process, in random order per pair, over rotating inputs.

On a GPU an arm is a CUDA graph of several calls, each on another input set, so that neither the host nor a warm L2
is measured; a replay is timed with device events behind a short backlog, which keeps the graph's launch out of the
figure. Without a GPU the same arms run in a loop under ``time.perf_counter_ns``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

Call = Callable[..., Any]
Inputs = tuple[Any, ...]

SAMPLE_US = 400.0  # a sample lasts at least this long: events resolve about 0.5 µs
BACKLOG_US = 300.0  # spin ahead of each pair, longer than the host needs to enqueue a graph
HOST_SAMPLE_US = 20_000.0  # of calls whose host time is taken: some hundreds of launches
WARM_UP_S = 0.2  # before the first pair: clocks leave idle
MIN_PAIRS = 30


class Timed(Protocol):
    """One arm, ready to run. ``outputs`` holds the result of the latest call on each input set."""

    outputs: list[Any]

    def start(self) -> None:
        """Run (or enqueue) one sample."""

    def elapsed_us(self) -> float:
        """Microseconds per call of the sample last started; valid after the clock's ``wait``."""


class Clock(Protocol):
    """How arms are timed on one device."""

    def prepare(self, call: Call, sets: Sequence[Inputs]) -> Timed:
        """Make an arm of ``call(*inputs)`` over the rotating input sets."""

    def backlog(self) -> None:
        """Called before each pair."""

    def wait(self) -> None:
        """Return when everything started has finished."""

    def delay(self, microseconds: float) -> Callable[[], None]:
        """A callable that adds about that much to whatever this clock times."""


class HostTimed:
    """An arm timed by the host: a sample is as many calls as last ``SAMPLE_US``, at least one, over the input sets in
    turn, then ``finish``."""

    def __init__(self, call: Call, sets: Sequence[Inputs], finish: Callable[[], None] = lambda: None) -> None:
        self._call, self._sets, self._finish = call, sets, finish
        self.outputs: list[Any] = [None] * len(sets)
        self._next, self._calls = 0, len(sets)
        self.start()
        self.start()  # the first one may have compiled or allocated
        self._calls = math.ceil(SAMPLE_US / self.elapsed_us())

    def start(self) -> None:
        """Run one sample."""
        begin = time.perf_counter_ns()
        for _ in range(self._calls):
            self.outputs[self._next] = self._call(*self._sets[self._next])
            self._next = (self._next + 1) % len(self._sets)
        self._finish()
        self._elapsed_ns = time.perf_counter_ns() - begin

    def elapsed_us(self) -> float:
        """Microseconds per call of the last sample."""
        return self._elapsed_ns / (1e3 * self._calls)


class HostClock:
    """Times on the CPU with ``time.perf_counter_ns``."""

    def prepare(self, call: Call, sets: Sequence[Inputs]) -> HostTimed:
        """An arm timed by the host."""
        return HostTimed(call, sets)

    def backlog(self) -> None:
        """Nothing: the host runs synchronously."""

    def wait(self) -> None:
        """Nothing: the host runs synchronously."""

    def delay(self, microseconds: float) -> Callable[[], None]:
        """Spin for that long; ``time.sleep`` is too coarse."""

        def spin() -> None:
            end = time.perf_counter_ns() + int(microseconds * 1e3)
            while time.perf_counter_ns() < end:
                pass

        return spin


class WallClock(HostClock):
    """Times calls on a GPU by the host, with one synchronisation a sample: for what cannot be captured, and for what
    saves the host's time."""

    def prepare(self, call: Call, sets: Sequence[Inputs]) -> HostTimed:
        """An arm timed by the host."""
        return HostTimed(call, sets, torch.cuda.synchronize)

    def delay(self, microseconds: float) -> Callable[[], None]:
        """Wait for the device, then spin for that long: a spin beside the device's own work would not be seen."""
        spin = super().delay(microseconds)

        def wait_and_spin() -> None:
            torch.cuda.synchronize()
            spin()

        return wait_and_spin


class GraphTimed:
    """An arm as a CUDA graph of ``rounds`` passes over all input sets, timed by events around its replay."""

    def __init__(self, call: Call, sets: Sequence[Inputs]) -> None:
        self.outputs: list[Any] = [None] * len(sets)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile and create handles before capture
            for inputs in sets[:3]:
                call(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._capture(call, sets, rounds=1)
        one_round_us = min(self._replay_us() for _ in range(3)) * self._calls
        if one_round_us < SAMPLE_US:
            self._capture(call, sets, rounds=math.ceil(SAMPLE_US / one_round_us))
            self._replay_us()

    def _capture(self, call: Call, sets: Sequence[Inputs], rounds: int) -> None:
        torch.cuda.synchronize()
        self.outputs = [None] * len(sets)  # each set keeps its output: written buffers rotate as read ones do
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(rounds):
                for index, inputs in enumerate(sets):
                    self.outputs[index] = call(*inputs)
        self._calls = rounds * len(sets)

    def _replay_us(self) -> float:
        self.start()
        torch.cuda.synchronize()
        return self.elapsed_us()

    def start(self) -> None:
        """Enqueue one replay between two events."""
        self._begin.record()
        self._graph.replay()
        self._end.record()

    def elapsed_us(self) -> float:
        """GPU microseconds per call of the last replay."""
        return self._begin.elapsed_time(self._end) * 1e3 / self._calls


class GraphClock:
    """Times CUDA graph replays with events on the current device."""

    def __init__(self) -> None:
        cycles = 1_000_000
        spin = GraphTimed(lambda: torch.cuda._sleep(cycles), [()])
        warm_until = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < warm_until:
            spin.start()
            torch.cuda.synchronize()
        self._cycles_per_us = cycles / spin.elapsed_us()

    def prepare(self, call: Call, sets: Sequence[Inputs]) -> GraphTimed:
        """Capture an arm. Raises whatever the call or the capture raises."""
        return GraphTimed(call, sets)

    def backlog(self) -> None:
        """Keep the GPU busy while the host enqueues the pair."""
        torch.cuda._sleep(int(BACKLOG_US * self._cycles_per_us))

    def wait(self) -> None:
        """Synchronise the device."""
        torch.cuda.synchronize()

    def delay(self, microseconds: float) -> Callable[[], None]:
        """A kernel that spins for that long; clocks may have moved since calibration, so read it as about."""
        cycles = int(microseconds * self._cycles_per_us)
        return lambda: torch.cuda._sleep(cycles)


def clock_for(device: torch.device) -> Clock:
    """The clock of a device: graph replays on CUDA (ROCm included), the host's elsewhere."""
    return GraphClock() if device.type == "cuda" else HostClock()


def paired_samples(
    clock: Clock, arms: Mapping[str, Timed], pairs: int, rng: np.random.Generator
) -> dict[str, tuple[float, ...]]:
    """Time every arm once per pair, in random order; microseconds per call, in pair order.

    Raises ValueError below 30 pairs: fewer do not carry a 95 % interval.
    """
    if pairs < MIN_PAIRS:
        raise ValueError(f"at least {MIN_PAIRS} pairs are needed for a 95 % interval, got {pairs}")
    names = list(arms)
    samples: dict[str, list[float]] = {name: [] for name in names}
    warm_until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < warm_until:
        for arm in arms.values():
            arm.start()
        clock.wait()
    for _ in range(pairs):
        clock.backlog()
        for index in rng.permutation(len(names)):
            arms[names[index]].start()
        clock.wait()
        for name in names:
            samples[name].append(float(arms[name].elapsed_us()))
    return {name: tuple(values) for name, values in samples.items()}


def sample_us(clock: Clock, call: Call, sets: Sequence[Inputs], repetitions: int = 20) -> float:
    """Median microseconds per call of one arm alone: for ceilings and calibration, never for a comparison."""
    timed = clock.prepare(call, sets)
    values = []
    for _ in range(repetitions):
        clock.backlog()
        timed.start()
        clock.wait()
        values.append(timed.elapsed_us())
    return float(np.median(values))


def host_us(call: Call, inputs: Inputs, device: torch.device, calls: int = 20, repetitions: int = 7) -> float:
    """Median host microseconds of one eager call; few enough calls at a time that the launch queue never fills: fewer
    than ``calls`` where they take more than ``HOST_SAMPLE_US``."""
    _host_sample_us(call, inputs, device, 1)  # warms up
    calls = max(1, min(calls, int(HOST_SAMPLE_US / _host_sample_us(call, inputs, device, 1))))
    return float(np.median([_host_sample_us(call, inputs, device, calls) for _ in range(repetitions)]))


def _host_sample_us(call: Call, inputs: Inputs, device: torch.device, calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call(*inputs)
    microseconds = (time.perf_counter_ns() - begin) / (1e3 * calls)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return microseconds
