"""The micro judge on the host's clock: controls, wrong fusions, verdicts that follow from their samples."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
import torch

from voxfuse.microbench.judge import (
    CONTROLS,
    Contest,
    compare,
    compulsory_bytes,
    error_fp64,
    fidelity_fault,
    judge,
    ratio_interval,
    recompute,
)
from voxfuse.microbench.timer import HostClock
from voxfuse.profiles.environment import capture_environment
from voxfuse.records import Case, Fusion, MicroVerdict, TensorSignature, from_json, to_json

FRAMES = 20_000


def fusion(contract="same-precision"):
    return Fusion(
        name="example", stacks=(), operations=("sin",), contract=contract, envelope="any float tensor", kernels=()
    )


def case():
    signature = TensorSignature(shape=(FRAMES,), dtype="float32", strides=(1,))
    return Case(name="example", stack="none", tensors={"x": signature})


def chain(x):
    return torch.sin(x) * torch.sin(x)


def spinning(microseconds):
    """The chain with a delay that dominates its time, so that a busy machine does not decide the test."""

    def call(x):
        end = time.perf_counter_ns() + int(microseconds * 1e3)
        out = chain(x)
        while time.perf_counter_ns() < end:
            pass
        return out

    return call


def contest(eager=chain, voxfuse=chain, contract="same-precision", **baselines):
    generator = torch.Generator().manual_seed(0)
    sets = [(torch.randn(FRAMES, generator=generator),) for _ in range(2)]
    ceilings = {"copy_bytes_per_s": 1e9, "launch_floor_us": 1.0}
    return Contest(fusion(contract), case(), sets, eager, voxfuse, baselines, ceilings)


def judged(**kwargs) -> MicroVerdict:
    return judge(contest(**kwargs), HostClock(), capture_environment(), pairs=30)


def arm(verdict, name):
    return next(arm for arm in verdict.arms if arm.name == name)


def test_a_fusion_twice_as_fast_wins_and_its_controls_are_sound():
    verdict = judged(eager=spinning(1000), voxfuse=spinning(400), slower=spinning(1500), missing="nobody wrote it")
    assert verdict.wrong is None
    assert verdict.controls["sound"] == 1.0
    ratios = {ratio.baseline: ratio for ratio in verdict.ratios}
    assert ratios.keys() == {"eager", "slower"}
    assert all(ratio.verdict == "win" for ratio in ratios.values())
    assert ratios["eager"].median == pytest.approx(2.5, rel=0.1)
    assert ratios["eager"].low <= ratios["eager"].median <= ratios["eager"].high
    assert verdict.controls["sleep_found_us"] == pytest.approx(verdict.controls["sleep_added_us"], rel=0.3)
    assert arm(verdict, "missing").absent == "nobody wrote it"
    assert all(len(arm(verdict, name).gpu_us) == 30 for name in ("eager", "slower", "voxfuse", *CONTROLS))
    assert verdict.speed_of_light == pytest.approx(160 / 400, rel=0.1)  # 160 kB at 1 GB/s in 400 µs


def test_a_slower_fusion_loses_and_an_equal_one_is_neutral():
    slower = judged(eager=spinning(400), voxfuse=spinning(1000))
    assert [ratio.verdict for ratio in slower.ratios] == ["loss"]
    equal = judged(eager=spinning(600), voxfuse=spinning(600))
    assert [ratio.verdict for ratio in equal.ratios] == ["neutral"]


def test_recompute_gives_the_stored_verdict_and_json_keeps_it():
    verdict = judged(eager=spinning(500), voxfuse=spinning(300))
    assert recompute(verdict) == verdict
    assert recompute(from_json(to_json(verdict), MicroVerdict)) == verdict
    boasting = msgspec.structs.replace(
        verdict, ratios=tuple(msgspec.structs.replace(ratio, median=9.0) for ratio in verdict.ratios), win_bar=0.0
    )
    assert recompute(boasting) == verdict


def test_noise_that_hides_the_sleep_control_makes_every_comparison_neutral():
    verdict = judged(eager=spinning(1000), voxfuse=spinning(400))
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


class RightOnlyAtFirst:
    """Right for the fidelity check, wrong afterwards, as a race is."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return chain(x) if self.calls <= 2 else chain(x) + 0.01


@pytest.mark.parametrize(
    ("call", "contract", "reason"),
    [
        (lambda x: chain(x) * (1 + 1e-5), "same-precision", "relative RMS error"),
        (lambda x: chain(x) + torch.eye(1, FRAMES)[0] * 1e-6, "bitwise", "1 of 20000 elements differ"),
        (lambda x: chain(x).half(), "reduced", "expected (20000,) torch.float32, got (20000,) torch.float16"),
        (lambda x: chain(x)[1:], "reduced", "got (19999,)"),
        (unwritten, "same-precision", "1 of 20000 elements are NaN"),
        (raising, "same-precision", "RuntimeError: misaligned address"),
        (RightOnlyAtFirst(), "same-precision", "after timed replays"),
    ],
)
def test_a_wrong_fusion_gets_no_speed(call, contract, reason):
    verdict = judged(voxfuse=call, contract=contract)
    assert reason in verdict.wrong
    assert not any(a.gpu_us or a.host_us for a in verdict.arms)
    assert verdict.ratios == () and verdict.controls == {} and verdict.speed_of_light is None
    assert recompute(verdict) == verdict
    assert from_json(to_json(verdict), MicroVerdict) == verdict


def test_a_baseline_that_raises_is_absent_and_the_contest_goes_on():
    verdict = judged(voxfuse=spinning(300), eager=spinning(300), broken=raising)
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
