"""The judge over many cases: which cases, what is judged already, when to stop. Every caller of the judge uses this."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import torch

from voxfuse.fusions.registry import fusion
from voxfuse.kernels._op import Run, backend_unavailable
from voxfuse.microbench import decode_step_arms
from voxfuse.microbench.arms import contest, operation_of
from voxfuse.microbench.cases import JudgedCase, load_cases, stacks_with_cases
from voxfuse.microbench.ceilings import machine_ceilings
from voxfuse.microbench.judge import judge
from voxfuse.microbench.timer import Clock, WallClock, clock_for
from voxfuse.profiles.environment import capture_environment
from voxfuse.recompute import VOXFUSE
from voxfuse.records import Backend, Case, Environment, MicroVerdict, TensorSignature

FIRST_CASE_S = 30.0  # until one has been timed: compiling and warming up
DRY_FRAMES = 40
PACKAGES = ("numpy", "kokoro", "transformers")
SAME_CODE = ("commit", "voxfuse", "torch", "triton", "gpu", "gpu_uuid_sha256")  # of an environment, to go on in it

Key = tuple[str, str, str]  # fusion, stack, case
Outcome = Literal["judged", "unsound", "wrong", "missing"]


class Bench(NamedTuple):
    """How a run judges. ``left`` gives the seconds left; a case begins only where the last one's time is there."""

    device: torch.device
    pairs: int = 50
    backend: Backend = "triton"
    compile_backend: str = "inductor"
    left: Callable[[], float] = lambda: float("inf")

    @property
    def dry(self) -> bool:
        """On a CPU the arms run and nothing is claimed."""
        return self.device.type == "cpu"


class Judged(NamedTuple):
    """One case and its verdict; None where the time did not reach it, or a library that it needs is absent."""

    case: JudgedCase
    verdict: MicroVerdict | None

    @property
    def outcome(self) -> Outcome:
        """``wrong``: the fusion is; ``unsound``: a control failed, so no comparison counts."""
        if self.verdict is None:
            return "missing"
        if self.verdict.wrong is not None:
            return "wrong"
        return "judged" if self.verdict.controls["sound"] == 1.0 else "unsound"


def bench_for(device: torch.device, pairs: int, left: Callable[[], float], backend: Backend | None = None) -> Bench:
    """Kernels on a GPU; on a CPU a dry run of the reference. Raises ValueError where the backend cannot run."""
    dry = device.type == "cpu"
    chosen: Backend = backend or ("reference" if dry else "triton")
    if (reason := backend_unavailable(chosen)) is not None:
        raise ValueError(f"backend {chosen}: {reason}")
    return Bench(device, pairs, chosen, "eager" if dry else "inductor", left)


def choose(fusions: Sequence[str] = (), stack: str | None = None, case: str | None = None) -> list[JudgedCase]:
    """The cases of some fusions (all for none), of one stack, whose name contains ``case``.

    Raises KeyError, listing what there is, for an unknown fusion or stack, and where no case is left.
    """
    for name in fusions:
        fusion(name)
    stacks = stacks_with_cases() if stack is None else (stack,)
    cases = [
        judged
        for name in stacks
        for judged in load_cases(name)
        if (not fusions or judged.fusion in fusions) and (case is None or case in judged.case.name)
    ]
    if not cases:
        if fusions and all(fusion(name).graph for name in fusions) and case is None:
            raise KeyError(f"{', '.join(fusions)}: graphs save the host's time: voxfuse gate judges them by its blocks")
        asked = f"{', '.join(fusions) or 'any fusion'} on {', '.join(stacks)}"
        raise KeyError(f"no case of {asked}" + (f" with {case!r} in its name" if case else ""))
    return cases


def key_of(fusion_name: str, case: Case) -> Key:
    """By what a verdict's case is found again."""
    return fusion_name, case.stack, case.name


def reusable(verdicts: Iterable[MicroVerdict], here: Environment, dry: bool) -> dict[Key, MicroVerdict]:
    """The verdicts that a resumed run need not repeat: of this code on this GPU, right, with sound controls."""
    same = [
        verdict
        for verdict in verdicts
        if all(getattr(verdict.environment, name) == getattr(here, name) for name in SAME_CODE)
    ]
    return {
        key_of(verdict.fusion, verdict.case): verdict
        for verdict in same
        if verdict.wrong is None and (dry or verdict.controls["sound"] == 1.0)
    }


def run(
    cases: Iterable[JudgedCase],
    bench: Bench,
    there: Mapping[Key, MicroVerdict],
    keep: Callable[[MicroVerdict], object],
    clock: Clock | None = None,
    broke: Callable[[JudgedCase, Exception], object] | None = None,
) -> Iterator[Judged]:
    """Judge every case that is not ``there`` while there is time; ``keep`` stores each verdict as it comes.

    A case of a library that is absent has no verdict and warns (RuntimeWarning). What a case raises otherwise is
    raised; where ``broke`` takes it instead, the case has no verdict and the next one follows.
    """
    machine: dict[str, float] = {}
    clock = clock or clock_for(bench.device)
    environment = capture_environment(PACKAGES)
    expected_s = FIRST_CASE_S
    for judged in cases:
        verdict = there.get(key_of(judged.fusion, judged.case))
        if verdict is None and bench.left() >= expected_s:
            begin = time.monotonic()
            machine = machine or machine_ceilings(clock, bench.device)
            try:
                verdict = _verdict(judged, bench, clock, machine, environment)
            except ImportError as absent:  # a case of upstream's own modules
                warnings.warn(f"{judged.case.name}: not judged, {absent}", RuntimeWarning, stacklevel=2)
            except Exception as error:
                if broke is None:
                    raise
                broke(judged, error)
            if verdict is not None:
                keep(verdict)
                expected_s = max(time.monotonic() - begin, 0.7 * expected_s)
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
        yield Judged(judged, verdict)


def _verdict(
    judged: JudgedCase, bench: Bench, clock: Clock, machine: Mapping[str, float], environment: Environment
) -> MicroVerdict:
    """One case judged; what was made for it, maybe a model, is gone at the end."""
    how = Run(bench.backend, "bench")
    made = contest(judged.fusion, judged.case, bench.device, clock, how, machine, bench.compile_backend)
    return judge(made, clock_of(judged, clock, bench.device), environment, pairs=bench.pairs)


def clock_of(judged: JudgedCase, clock: Clock, device: torch.device) -> Clock:
    """The clock by which a case is judged: ``clock``, or on a GPU the wall's where that is what counts."""
    by_wall = operation_of(judged.fusion, judged.case).timed == "wall" and device.type == "cuda"
    return WallClock() if by_wall else clock


def tiny(cases: Iterable[JudgedCase]) -> list[JudgedCase]:
    """For a dry run: the first case of every fusion, with a few frames."""
    first_of_each = {case.fusion: case for case in reversed(list(cases))}
    return [msgspec.structs.replace(case, case=_tiny(case.case)) for case in first_of_each.values()]


def _tiny(case: Case) -> Case:
    if "family" in case.parameters:
        return decode_step_arms.tiny(case)
    if case.stack == "transformers" or "x" not in case.tensors:  # decode cases are small as they are
        return case
    *outer, _ = case.tensors["x"].shape
    frames = 2 * int(case.parameters["scale"]) if "scale" in case.parameters else DRY_FRAMES
    x = torch.empty(*outer, frames, device="meta")
    signature = TensorSignature(shape=tuple(x.shape), dtype="float32", strides=x.stride())
    return msgspec.structs.replace(case, name=f"dry run, {case.name}", tensors={**case.tensors, "x": signature})


def medians_us(verdict: MicroVerdict) -> dict[str, float]:
    """Median GPU microseconds of every arm that ran."""
    return {arm.name: float(np.median(arm.gpu_us)) for arm in verdict.arms if arm.gpu_us}


def summary(verdict: MicroVerdict) -> str:
    """A verdict on one line."""
    if verdict.wrong is not None:
        return f"wrong: {verdict.wrong}"
    arms, microseconds = {arm.name: arm for arm in verdict.arms}, medians_us(verdict)
    ratios = ", ".join(
        f"{ratio.baseline} {microseconds[ratio.baseline]:.1f} = {ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
        f" {ratio.verdict}"
        for ratio in verdict.ratios
    )
    voxfuse, eager = arms[VOXFUSE], arms["eager"]
    bandwidth = verdict.bytes_moved / microseconds[VOXFUSE] / 1e6
    peak = verdict.ceilings["peak_copy_bytes_per_s"] / 1e12
    return (
        f"voxfuse {microseconds[VOXFUSE]:.1f} us; {ratios}; {verdict.speed_of_light:.2f} of light, "
        f"{bandwidth:.2f} of {peak:.2f} TB/s; launches {eager.launches}->{voxfuse.launches}; host {eager.host_us:.0f}->"
        f"{voxfuse.host_us:.0f} us; error {eager.error_fp64:.1e}->{voxfuse.error_fp64:.1e}"
    )
