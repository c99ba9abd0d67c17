"""The micro judge: controls, wrong fusions, verdicts that follow from their samples. Time is simulated, with noise, so
that a busy machine decides nothing; one test uses the host's clock."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from voxfuse.microbench.judge import Contest, compulsory_bytes, error_fp64, fidelity_fault, judge
from voxfuse.microbench.timer import HostClock
from voxfuse.profiles.environment import capture_environment
from voxfuse.recompute import CONTROLS, compare, ratio_interval, recompute
from voxfuse.records import Case, Fusion, MicroVerdict, TensorSignature, from_json, to_json

FRAMES = 2_000


def fusion(contract="same-precision"):
    return Fusion(
        name="example", stacks=(), operations=("sin",), contract=contract, envelope="any float tensor", kernels=()
    )


def case():
    signature = TensorSignature(shape=(FRAMES,), dtype="float32", strides=(1,))
    return Case(name="example", stack="none", tensors={"x": signature})


def chain(x):
    return torch.sin(x) * torch.sin(x)


class SimulatedClock:
    """Time passes when calls spend it; each sample is off by a few per mille, as on a quiet GPU."""

    def __init__(self, noise: float = 0.005) -> None:
        self.now_us = 0.0
        self.noise = noise
        self.rng = np.random.default_rng(3)

    def spend(self, microseconds: float) -> None:
        self.now_us += microseconds

    def costing(self, microseconds: float):
        def call(x):
            self.spend(microseconds)
            return chain(x)

        return call

    def prepare(self, call, sets):
        clock = self

        class Timed:
            def __init__(self):
                self.start()

            def start(self):
                begin = clock.now_us
                self.outputs = [call(*inputs) for inputs in sets]
                self._us = (clock.now_us - begin) / len(sets) * np.exp(clock.rng.normal(0, clock.noise))

            def elapsed_us(self):
                return self._us

        return Timed()

    def backlog(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def delay(self, microseconds: float):
        return lambda: self.spend(microseconds)


def contest(eager, voxfuse, contract, baselines):
    generator = torch.Generator().manual_seed(0)
    sets = [(torch.randn(FRAMES, generator=generator),) for _ in range(2)]
    ceilings = {"copy_bytes_per_s": 1e8, "launch_floor_us": 1.0}
    return Contest(fusion(contract), case(), sets, eager, voxfuse, baselines, ceilings)


def judged(clock, *, eager, voxfuse, contract="same-precision", **baselines) -> MicroVerdict:
    return judge(contest(eager, voxfuse, contract, baselines), clock, capture_environment(), pairs=30)


@pytest.fixture
def clock():
    return SimulatedClock()


def arm(verdict, name):
    return next(arm for arm in verdict.arms if arm.name == name)


def test_a_fusion_twice_as_fast_wins_and_its_controls_are_sound(clock):
    verdict = judged(
        clock,
        eager=clock.costing(1000),
        voxfuse=clock.costing(400),
        slower=clock.costing(1500),
        missing="nobody made it",
    )
    assert verdict.wrong is None
    assert verdict.controls["sound"] == 1.0
    ratios = {ratio.baseline: ratio for ratio in verdict.ratios}
    assert ratios.keys() == {"eager", "slower"}
    assert all(ratio.verdict == "win" for ratio in ratios.values())
    assert ratios["eager"].median == pytest.approx(2.5, rel=0.01)
    assert ratios["eager"].low <= ratios["eager"].median <= ratios["eager"].high
    assert verdict.controls["sleep_found_us"] == pytest.approx(100, rel=0.05)  # a quarter of 400
    assert verdict.controls["sleep_added_us"] == pytest.approx(100, rel=0.01)
    assert verdict.controls["null_ratio"] == pytest.approx(1, abs=0.01)
    assert verdict.aa_half_width < 0.01 and verdict.win_bar == 0.03
    assert arm(verdict, "missing").absent == "nobody made it"
    assert all(len(arm(verdict, name).gpu_us) == 30 for name in ("eager", "slower", "voxfuse", *CONTROLS))
    assert verdict.speed_of_light == pytest.approx(160 / 400, rel=0.01)  # 16 kB at 0.1 GB/s in 400 µs


@pytest.mark.parametrize(
    ("eager_us", "voxfuse_us", "verdict"),
    [(400, 1000, "loss"), (600, 600, "neutral"), (600, 590, "neutral"), (600, 560, "win"), (600, 640, "loss")],
)
def test_the_verdict_follows_from_the_times(clock, eager_us, voxfuse_us, verdict):
    got = judged(clock, eager=clock.costing(eager_us), voxfuse=clock.costing(voxfuse_us))
    assert [ratio.verdict for ratio in got.ratios] == [verdict]


def test_noise_raises_the_bar():
    clock = SimulatedClock(noise=0.15)
    verdict = judged(clock, eager=clock.costing(430), voxfuse=clock.costing(400))
    assert verdict.win_bar == pytest.approx(2 * verdict.aa_half_width) and verdict.win_bar > 0.03
    assert [ratio.verdict for ratio in verdict.ratios] == ["neutral"]


def test_the_launch_floor_bounds_small_calls(clock):
    made = contest(clock.costing(4), clock.costing(2), "same-precision", {})
    made = dataclasses.replace(made, ceilings={"copy_bytes_per_s": 1e15, "launch_floor_us": 1.5})
    verdict = judge(made, clock, capture_environment(), pairs=30)
    assert verdict.speed_of_light == pytest.approx(0.75, rel=0.01)


def test_on_the_hosts_clock_the_samples_are_of_the_calls():
    made = contest(chain, chain, "same-precision", {})
    verdict = judge(made, HostClock(), capture_environment(), pairs=30)
    assert verdict.wrong is None
    assert all(1 < us < 1e5 for a in verdict.arms for us in a.gpu_us)
    assert arm(verdict, "eager").host_us > 1
    assert recompute(verdict) == verdict


def test_recompute_gives_the_stored_verdict_and_json_keeps_it(clock):
    verdict = judged(clock, eager=clock.costing(500), voxfuse=clock.costing(300))
    assert recompute(verdict) == verdict
    assert recompute(from_json(to_json(verdict), MicroVerdict)) == verdict
    boasting = msgspec.structs.replace(
        verdict, ratios=tuple(msgspec.structs.replace(ratio, median=9.0) for ratio in verdict.ratios), win_bar=0.0
    )
    assert recompute(boasting) == verdict


def test_noise_that_hides_the_sleep_control_makes_every_comparison_neutral(clock):
    verdict = judged(clock, eager=clock.costing(1000), voxfuse=clock.costing(400))
    quiet = {a.name: a for a in verdict.arms}
    deaf = msgspec.structs.replace(quiet["sleep"], gpu_us=quiet["voxfuse"].gpu_us)
    again = recompute(msgspec.structs.replace(verdict, arms=(*(quiet[n] for n in quiet if n != "sleep"), deaf)))
    assert again.controls["sound"] == 0.0
    assert [ratio.verdict for ratio in again.ratios] == ["neutral"]


def unwritten(x):
    out = torch.empty_like(x)
    out[:-1] = chain(x)[:-1]
    return out


def raising(x):
    raise RuntimeError("misaligned address")


@pytest.mark.parametrize(
    ("call", "contract", "reason"),
    [
        (lambda x: chain(x) * (1 + 1e-5), "same-precision", "relative RMS error"),
        (lambda x: chain(x) + torch.eye(1, FRAMES)[0] * 1e-6, "bitwise", "1 of 2000 elements differ"),
        (lambda x: chain(x).half(), "reduced", "expected (2000,) torch.float32, got (2000,) torch.float16"),
        (lambda x: chain(x)[1:], "reduced", "got (1999,)"),
        (unwritten, "same-precision", "1 of 2000 elements are NaN"),
        (raising, "same-precision", "RuntimeError: misaligned address"),
    ],
)
def test_a_wrong_fusion_gets_no_speed(clock, call, contract, reason):
    verdict = judged(clock, eager=clock.costing(10), voxfuse=call, contract=contract)
    assert reason in verdict.wrong
    assert not any(a.gpu_us or a.host_us for a in verdict.arms)
    assert verdict.ratios == () and verdict.controls == {} and verdict.speed_of_light is None
    assert recompute(verdict) == verdict
    assert from_json(to_json(verdict), MicroVerdict) == verdict


def test_a_fusion_that_is_right_only_when_first_checked_gets_no_speed(clock):
    calls = 0

    def racing(x):
        nonlocal calls
        calls += 1
        clock.spend(10)
        return chain(x) if calls <= 2 else chain(x) + 0.01

    verdict = judged(clock, eager=clock.costing(10), voxfuse=racing)
    assert "after timed replays: contract same-precision" in verdict.wrong
    assert not any(a.gpu_us for a in verdict.arms)


def test_a_baseline_that_raises_is_absent_and_the_contest_goes_on(clock):
    verdict = judged(clock, voxfuse=clock.costing(300), eager=clock.costing(300), broken=raising)
    assert arm(verdict, "broken").absent == "RuntimeError: misaligned address"
    assert [ratio.baseline for ratio in verdict.ratios] == ["eager"]


def test_interval_of_known_samples():
    noise = np.random.default_rng(1).normal(0, 0.01, 200)
    median, low, high = ratio_interval(2 * np.exp(noise), np.ones(200))
    # Asymptotic standard error of a median is sqrt(pi/2) sigma / sqrt(n) = 0.00177 of the value.
    assert (median, low, high) == pytest.approx((2, 2 - 0.0035 * 2, 2 + 0.0035 * 2), abs=0.005)
    assert ratio_interval(np.full(30, 3.0), np.full(30, 2.0)) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.031, 1.2, "win"),
        (1.02, 1.2, "neutral"),
        (0.9, 0.96, "loss"),
        (0.9, 0.98, "neutral"),
        (0.8, 1.5, "neutral"),
    ],
)
def test_comparison_bar(low, high, verdict):
    assert compare(low, high, 0.03) == verdict


def test_error_and_bytes_against_hand_computation():
    oracle = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert error_fp64(torch.tensor([3.0, 4.5]), oracle) == pytest.approx(0.1)
    x = torch.zeros(10)
    assert compulsory_bytes((x, x, None, 0.5, torch.zeros(3, dtype=torch.float16)), torch.zeros(10)) == 40 + 6 + 40


def test_same_precision_allows_one_unit_in_the_last_place_where_eager_is_exact():
    eager = torch.linspace(1, 2, 1000)
    oracle = eager.double()
    assert fidelity_fault("same-precision", eager * (1 + 2**-24), eager, oracle) is None
    assert fidelity_fault("same-precision", eager * (1 + 2**-21), eager, oracle) is not None
