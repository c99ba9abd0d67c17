"""What the micro judge can tell apart. Times are simulated as a GPU gives them: every sample off by some per mille, the
clock drifting over the run, now and then a sample far too long. On a GPU the same is asked of real replays."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from voxfuse.kernels._op import Run
from voxfuse.microbench import timer
from voxfuse.microbench.arms import contest
from voxfuse.microbench.bench import choose
from voxfuse.microbench.ceilings import machine_ceilings
from voxfuse.microbench.judge import Contest, judge
from voxfuse.microbench.timer import GraphClock, paired_samples
from voxfuse.profiles.environment import capture_environment
from voxfuse.recompute import compare, inconsistency, ratio_interval
from voxfuse.records import Case, Fusion, TensorSignature

RUNS, MUST_FIND = 100, 95
PAIRS = 30
PLANTED = 1.05
AA_BOUND = 0.015
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class NoisyClock:
    """Simulated replays. White noise of 0.6 % a sample (an H200 shows 0.1 to 0.3 %), boost clocks that wander by 1 %,
    and one sample in fifty up to 30 % too long."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.drift = 0.0
        self.spent = 0.0

    def costing(self, microseconds: float, error: float = 0.0) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            self.spent += microseconds
            return x * 2 * (1 + error)

        return call

    def prepare(self, call: Any, sets: Any) -> Any:
        clock = self

        class Timed:
            def __init__(self) -> None:
                self.start()

            def start(self) -> None:
                before = clock.spent
                self.outputs = [call(*inputs) for inputs in sets]
                clock.drift = 0.98 * clock.drift + clock.rng.normal(0, 0.002)
                noise = clock.rng.normal(0, 0.006) + clock.drift
                spike = clock.rng.uniform(0, 0.3) if clock.rng.random() < 0.02 else 0.0
                self._us = (clock.spent - before) / len(sets) * np.exp(noise) * (1 + spike)

            def elapsed_us(self) -> float:
                return float(self._us)

        return Timed()

    def backlog(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def delay(self, microseconds: float) -> Any:
        def add() -> None:
            self.spent += microseconds

        return add


FUSION = Fusion(name="planted", stacks=(), operations=("mul",), contract="same-precision", envelope="any", kernels=())
CASE = Case(name="planted", stack="none", tensors={"x": TensorSignature(shape=(64,), dtype="float32", strides=(1,))})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated clocks need no warming up."""
    monkeypatch.setattr(timer, "WARM_UP_S", 0.0)


def judged(seed: int, eager_us: float, voxfuse_us: float, error: float = 0.0) -> Any:
    clock = NoisyClock(seed)
    sets = [(torch.linspace(1, 2, 64),)]
    ceilings = {"copy_bytes_per_s": 1e12, "launch_floor_us": 1.0}
    made = Contest(FUSION, CASE, sets, clock.costing(eager_us), clock.costing(voxfuse_us, error), {}, ceilings)
    return judge(made, clock, capture_environment(), pairs=PAIRS, seed=seed)


def outcomes(eager_us: float, voxfuse_us: float) -> list[str]:
    return [judged(seed, eager_us, voxfuse_us).ratios[0].verdict for seed in range(RUNS)]


@pytest.mark.slow
def test_a_planted_slowdown_of_5_percent_is_found_in_95_of_100_runs(quick: None) -> None:
    found = outcomes(20.0, 20.0 * PLANTED)
    assert found.count("loss") >= MUST_FIND, found.count("loss")


@pytest.mark.slow
def test_identical_arms_are_neutral_and_a_a_lies_within_its_bound(quick: None) -> None:
    verdicts = [judged(seed, 20.0, 20.0) for seed in range(RUNS)]
    assert sum(verdict.ratios[0].verdict != "neutral" for verdict in verdicts) <= RUNS - MUST_FIND
    assert sum(verdict.aa_half_width <= AA_BOUND for verdict in verdicts) >= MUST_FIND
    assert all(inconsistency(verdict) is None for verdict in verdicts)


def test_a_planted_wrong_result_never_gets_a_speed(quick: None) -> None:
    for seed, error in enumerate((1e-6, 1e-5, 1e-3, 0.1, float("nan"), float("inf"))):
        verdict = judged(seed, 20.0, 2.0, error)
        assert verdict.wrong is not None and verdict.ratios == () and verdict.speed_of_light is None
        assert not any(arm.gpu_us or arm.host_us for arm in verdict.arms)


@pytest.mark.gpu
@needs_gpu
class TestGpu:
    device = torch.device("cuda")

    def adain(self, clock: GraphClock) -> Contest:
        """AdaIN with Snake of 10 s of speech: 22 µs on an H200."""
        [case] = choose(["adain_snake"], "kokoro", "generator 128x48001, 1 row")
        ceilings = machine_ceilings(clock, self.device)
        return contest("adain_snake", case.case, self.device, clock, Run("triton", "test"), ceilings)

    def test_a_a_lies_within_its_bound(self) -> None:
        clock = GraphClock()
        made = self.adain(clock)
        with torch.no_grad():
            arms = {name: clock.prepare(made.voxfuse, made.sets) for name in ("first", "second")}
            samples = paired_samples(clock, arms, 50, np.random.default_rng(0))
        assert np.median(samples["first"]) >= 10, "a call this short is bound by its launch"
        _, low, high = ratio_interval(*(np.asarray(samples[name]) for name in ("first", "second")))
        assert 1 - AA_BOUND < low <= high < 1 + AA_BOUND, (low, high)

    def test_a_planted_slowdown_of_5_percent_is_found_in_95_of_100_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same copy of 20 buffers or of 21: 5 % more of the same work."""
        clock = GraphClock()
        monkeypatch.setattr(timer, "WARM_UP_S", 0.02)
        sets = [
            tuple(torch.randn(4 << 20, device=self.device) for _ in range(21)) for _ in range(2)
        ]  # 16 MB a buffer: a set is 336 MB, far beyond the L2

        def copies(count: int) -> Any:
            def call(*buffers: torch.Tensor) -> torch.Tensor:
                for index in range(count):
                    torch.neg(buffers[index], out=buffers[index])
                return buffers[0]

            return call

        arms = {"baseline": clock.prepare(copies(20), sets), "slower": clock.prepare(copies(21), sets)}
        found, false = 0, 0
        for seed in range(RUNS):
            samples = paired_samples(clock, arms, PAIRS, np.random.default_rng(seed))
            _, low, high = ratio_interval(np.asarray(samples["baseline"]), np.asarray(samples["slower"]))
            found += compare(low, high, 0.03) == "loss"
            false += compare(low, high, 0.03) == "win"
        assert found >= MUST_FIND and false == 0, (found, false)

    def test_a_planted_wrong_result_never_gets_a_speed(self) -> None:
        clock = GraphClock()
        made = self.adain(clock)
        right = made.voxfuse
        for spoil in (lambda y: y * (1 + 1e-4), lambda y: torch.where(y == y.max(), torch.nan, y)):
            wrong = with_call(made, lambda *inputs, spoil=spoil: spoil(right(*inputs)))
            verdict = judge(wrong, clock, capture_environment(), pairs=PAIRS)
            assert verdict.wrong is not None and verdict.ratios == ()
            assert not any(arm.gpu_us or arm.host_us for arm in verdict.arms)

    def test_the_ceilings_are_those_of_a_gpu_and_in_the_record(self) -> None:
        clock = GraphClock()
        verdict = judge(self.adain(clock), clock, capture_environment(), pairs=PAIRS)
        assert verdict.wrong is None and inconsistency(verdict) is None
        ceilings = verdict.ceilings
        assert ceilings["peak_copy_bytes_per_s"] > 1e11
        assert ceilings["peak_bf16_flop_per_s"] > ceilings["peak_tf32_flop_per_s"] > ceilings["peak_fp32_flop_per_s"]
        assert verdict.speed_of_light is not None and 0.2 < verdict.speed_of_light < 1.1


def with_call(made: Contest, call: Any) -> Contest:
    """The contest with another fused call."""
    return Contest(made.fusion, made.case, made.sets, made.eager, call, {}, made.ceilings)


@pytest.mark.gpu
@needs_gpu
def test_tuning_on_a_gpu_keeps_results_right_and_the_table_as_it_was() -> None:
    from voxfuse.kernels import _tuned
    from voxfuse.kernels.adain import OPERATION
    from voxfuse.microbench import tune

    before = _tuned.read()
    device, clock = torch.device("cuda"), GraphClock()
    tunable = tune.TUNABLE[OPERATION]
    for name in ("resident 1024", "resident 8192"):
        tuned = tune.tune_class(
            OPERATION,
            tunable,
            name,
            tunable.classes[name],
            clock,
            device,
            Run("triton", "t"),
            capture_environment(),
            30,
        )
        assert len(tuned.microseconds) >= 4 and all(us > 0 for us in tuned.microseconds.values())
        assert tuned.row is None or msgspec.structs.asdict(tuned.row)["compute_capability"] != "*"
    assert _tuned.read() == before
