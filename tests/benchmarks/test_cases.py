"""The micro judge for people who live in pytest-benchmark: ``pytest tests/benchmarks --benchmark-json FILE``.

pytest-benchmark is the collector: it cannot interleave arms, so the paired timer is ours, and each case's verdict lies
in ``extra_info``. What its own clock shows is one replay of the fused call with the host's wait for it. Without a GPU
only the smoke tests run, on a tiny shape: the reference is timed, the interpreted kernel is checked.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec
import pytest
import torch

from voxfuse.kernels._op import Run, backend_unavailable
from voxfuse.microbench import bench
from voxfuse.microbench.arms import contest
from voxfuse.microbench.ceilings import machine_ceilings
from voxfuse.microbench.judge import fidelity_fault, judge
from voxfuse.microbench.timer import Clock, clock_for
from voxfuse.profiles.environment import capture_environment
from voxfuse.recompute import VOXFUSE, inconsistency

pytest.importorskip("pytest_benchmark")
CASES = bench.choose()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@functools.cache
def machine(kind: str) -> tuple[Clock, dict[str, float]]:
    device = torch.device(kind)
    clock = clock_for(device)
    return clock, machine_ceilings(clock, device)


def collect(benchmark: Any, case: bench.JudgedCase, kind: str, backend: Any, compiler: str, pairs: int) -> Any:
    """Judge a case, put the verdict into ``extra_info`` and let pytest-benchmark time the fused call."""
    device = torch.device(kind)
    clock, ceilings = machine(kind)
    made = contest(case.fusion, case.case, device, clock, Run(backend, "pytest"), ceilings, compiler)
    clock = bench.clock_of(case, clock, device)
    verdict = judge(made, clock, capture_environment(bench.PACKAGES), pairs=pairs)
    benchmark.group = f"{case.fusion}: {case.case.name}"
    benchmark.extra_info["verdict"] = json.loads(msgspec.json.encode(verdict))
    if verdict.wrong is not None:  # no speed, here neither
        pytest.fail(f"wrong: {verdict.wrong}")
    benchmark.extra_info["median_us"] = bench.medians_us(verdict)
    benchmark.extra_info["ratios"] = {ratio.baseline: ratio.median for ratio in verdict.ratios}
    with torch.no_grad():
        timed = clock.prepare(made.voxfuse, made.sets)

        def replay() -> None:
            timed.start()
            clock.wait()

        benchmark.pedantic(replay, rounds=10, warmup_rounds=1)
    return verdict


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.fusion}-{case.case.name}".replace(" ", "_"))
def test_case(benchmark: Any, case: bench.JudgedCase) -> None:
    verdict = collect(benchmark, case, "cuda", "triton", "inductor", pairs=50)
    assert inconsistency(verdict) is None and verdict.controls["sound"] == 1.0
    torch.cuda.empty_cache()


def small() -> bench.JudgedCase:
    """AdaIN with Snake over two channels: the interpreter is slow."""
    [case] = bench.tiny(case for case in CASES if case.fusion == "adain_snake")
    tensors = case.case.tensors
    frames = tensors["x"].shape[2]
    x = msgspec.structs.replace(tensors["x"], shape=(1, 2, frames), strides=(2 * frames, frames, 1))
    style = msgspec.structs.replace(tensors["style"], shape=(1, 4))
    others = {name: msgspec.structs.replace(tensors[name], shape=(2,)) for name in ("weight", "bias", "alpha")}
    replaced = msgspec.structs.replace(case.case, tensors={"x": x, "style": style, **others})
    return msgspec.structs.replace(case, case=replaced)


@pytest.mark.slow
def test_smoke_on_the_reference(benchmark: Any) -> None:
    verdict = collect(benchmark, small(), "cpu", "reference", "eager", pairs=30)
    assert benchmark.extra_info["median_us"].keys() >= {VOXFUSE, "eager", "compile"}
    assert benchmark.extra_info["ratios"].keys() == {"eager", "compile"} and inconsistency(verdict) is None


def test_smoke_in_the_interpreter() -> None:
    """The interpreted kernel at a case: its error; it is much too slow for its time to mean anything."""
    if (reason := backend_unavailable("interpreter")) is not None:
        pytest.skip(reason)
    clock, ceilings = machine("cpu")
    made = contest("adain_snake", small().case, torch.device("cpu"), clock, Run("interpreter", "pytest"), ceilings)
    inputs = made.sets[0]
    oracle = made.eager(*(value.double() if torch.is_tensor(value) else value for value in inputs))
    assert fidelity_fault(made.fusion.contract, made.voxfuse(*inputs), made.eager(*inputs), oracle) is None
