"""The paired timer and the ceilings, on the host's clock and, where there is one, on a GPU."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from voxfuse.microbench.ceilings import MOST_SETS, copy_bytes_per_s, launch_floor_us, launches, peak_bytes, rotation
from voxfuse.microbench.timer import GraphClock, HostClock, WallClock, clock_for, host_us, paired_samples

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def spin(microseconds):
    end = time.perf_counter_ns() + int(microseconds * 1e3)
    while time.perf_counter_ns() < end:
        pass


def test_host_samples_are_microseconds_per_call_over_all_sets():
    clock = HostClock()
    seen = []

    def call(index):
        spin(50)
        seen.append(index)
        return index

    arms = {"a": clock.prepare(call, [(0,), (1,), (2,)]), "b": clock.prepare(lambda index: spin(100), [(0,)])}
    assert arms["a"].outputs == [0, 1, 2]
    assert sorted(set(seen)) == [0, 1, 2]
    samples = paired_samples(clock, arms, 30, np.random.default_rng(0))
    assert {name: len(values) for name, values in samples.items()} == {"a": 30, "b": 30}
    assert np.median(samples["a"]) == pytest.approx(50, rel=0.2)
    assert np.median(samples["b"]) == pytest.approx(100, rel=0.2)


def test_arms_are_run_in_random_order_within_each_pair():
    order = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def start(self):
            order.append(self.name)

        def elapsed_us(self):
            return 1.0

    clock = HostClock()
    paired_samples(clock, {name: Recorded(name) for name in "abc"}, 200, np.random.default_rng(0))
    pairs = [tuple(order[i : i + 3]) for i in range(len(order) - 600, len(order), 3)]
    assert all(sorted(pair) == list("abc") for pair in pairs)
    counts = [pairs.count(order) for order in sorted(set(pairs))]
    assert len(counts) == 6
    assert min(counts) > 15  # expected 33 each


def test_fewer_than_thirty_pairs_are_refused():
    with pytest.raises(ValueError, match="at least 30 pairs"):
        paired_samples(HostClock(), {}, 29, np.random.default_rng(0))


def test_host_delay_is_found():
    clock = HostClock()
    delay = clock.delay(200)
    arms = {"plain": clock.prepare(lambda: spin(300), [()]), "slow": clock.prepare(lambda: (spin(300), delay()), [()])}
    samples = paired_samples(clock, arms, 30, np.random.default_rng(0))
    assert np.median(np.subtract(samples["slow"], samples["plain"])) == pytest.approx(200, rel=0.2)


def test_host_cost_of_a_call():
    assert host_us(lambda: spin(40), (), CPU) == pytest.approx(40, rel=0.25)


def test_a_slow_call_is_a_sample_of_its_own_on_the_next_set():
    calls = []
    arm = HostClock().prepare(lambda index: (calls.append(index), spin(1000)), [(0,), (1,), (2,)])
    calls.clear()
    for _ in range(4):
        arm.start()
        assert 900 < arm.elapsed_us() < 20_000
    assert calls == [0, 1, 2, 0]


def test_the_host_cost_of_a_slow_call_takes_few_of_them():
    calls = []
    assert host_us(lambda: (calls.append(1), spin(15_000)), (), CPU) == pytest.approx(15_000, rel=0.5)
    assert len(calls) == 2 + 7


def test_the_wall_clocks_delay_begins_when_the_device_has_finished(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append(time.perf_counter()))
    WallClock().delay(500)()
    (at,) = done
    assert time.perf_counter() - at >= 500e-6


def test_ceilings_without_a_gpu():
    clock = clock_for(CPU)
    assert isinstance(clock, HostClock)
    assert rotation(1 << 20, CPU) == 2
    assert 1e8 < copy_bytes_per_s(clock, 1 << 22, CPU) < 1e12
    assert 0.1 < launch_floor_us(clock, CPU) < 100
    assert peak_bytes(torch.neg, (torch.ones(4),), CPU) is None
    assert launches(torch.neg, (torch.ones(4),), CPU) is None


@pytest.mark.gpu
@needs_gpu
class TestGpu:
    device = torch.device("cuda")

    def test_launches_and_peak_bytes_of_a_known_chain(self):
        x = torch.randn(1 << 20, device=self.device)
        assert launches(lambda x: torch.sin(torch.neg(x)), (x,), self.device) == 2
        assert peak_bytes(lambda x: torch.sin(torch.neg(x)), (x,), self.device) == 2 * x.nbytes

    def test_what_waits_for_the_device_has_no_launches_and_leaves_no_capture_behind(self):
        x = torch.randn(16, device=self.device)
        before = torch.cuda.current_stream()
        assert launches(lambda x: x.neg().sum().item(), (x,), self.device) is None
        assert torch.cuda.current_stream() == before and not torch.cuda.is_current_stream_capturing()
        assert launches(lambda x: x.neg(), (x,), self.device) == 1

    def test_rotation_exceeds_three_times_the_l2(self):
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        for footprint in (1 << 20, 1 << 22, 1 << 30):
            assert rotation(footprint, self.device) * footprint > 3 * l2
        assert rotation(1 << 10, self.device) == MOST_SETS

    def test_graph_samples_scale_with_the_work_and_find_a_delay(self):
        clock = GraphClock()
        sets = [(torch.randn(1 << 24, device=self.device),) for _ in range(4)]
        delay = clock.delay(100)
        arms = {
            "one": clock.prepare(lambda x: torch.sin(x), sets),
            "two": clock.prepare(lambda x: torch.sin(torch.sin(x)), sets),
            "slow": clock.prepare(lambda x: (torch.sin(x), delay()), sets),
        }
        samples = paired_samples(clock, arms, 30, np.random.default_rng(0))
        assert np.median(np.divide(samples["two"], samples["one"])) == pytest.approx(2, rel=0.15)
        assert np.median(np.subtract(samples["slow"], samples["one"])) == pytest.approx(100, rel=0.2)
        torch.testing.assert_close(arms["one"].outputs[3], torch.sin(sets[3][0]))

    def test_copy_bandwidth_is_below_any_memory_made(self):
        clock = GraphClock()
        assert 1e11 < copy_bytes_per_s(clock, 1 << 28, self.device) < 2e13
        assert 0.3 < launch_floor_us(clock, self.device) < 20
