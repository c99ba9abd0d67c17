"""The micro judge: one fusion at one shape against its baselines, as a MicroVerdict that carries its samples.

Order: fidelity first (a wrong fusion gets no speed); A/A, two preparations of the same fused call; then all arms
interleaved, with two controls in the same pairs: ``null``, the eager chain once more, judged as a fusion would be and
expected neutral, and ``sleep``, the fused call with a known delay, expected to lose to the fused call. What follows
from the samples is in ``voxfuse/recompute.py``, where the ledger computes it again.

The arm ``compile`` is replayed in a CUDA graph as every arm is, which is the better of plain torch.compile and
torch.compile under a graph; its ``host_us`` says what plain calls cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from voxfuse.microbench.ceilings import launches, peak_bytes
from voxfuse.microbench.timer import Call, Clock, Inputs, Timed, WallClock, host_us, paired_samples
from voxfuse.recompute import AA_FIRST, AA_SECOND, CONTROLS, EAGER, MIN_BAR, NULL, SLEEP, VOXFUSE, recompute
from voxfuse.records import Arm, Case, Contract, Environment, Fusion, MicroVerdict

NO_MORE_THAN_EAGER = 1.25  # contract same-precision: error at most this times the eager chain's
SLEEP_SHARE, SLEEP_FLOOR_US = 0.25, 5.0  # the delay of the sleep control
CHECKED_SETS = 2


@dataclass(frozen=True)
class Contest:
    """What is judged. Calls take the inputs of one set and return one tensor.

    ``eager`` is the exact upstream chain, and on double inputs the oracle; ``baselines`` are further arms, or the
    reason why one is absent. ``ceilings`` holds ``copy_bytes_per_s`` (at this footprint), ``launch_floor_us`` and,
    where the call does ``flop`` operations that could bound it, ``flop_per_s`` of their precision. ``compared`` maps an
    output to what is held against the oracle's; its error may be ``times_eager`` the eager chain's. ``counted`` has for
    arms that replay graphs of their own, and so cannot be captured, what they captured: its launches are counted.
    """

    fusion: Fusion
    case: Case
    sets: Sequence[Inputs]
    eager: Call
    voxfuse: Call
    baselines: Mapping[str, Call | str] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    flop: int = 0
    compared: Callable[[torch.Tensor], torch.Tensor] | None = None
    times_eager: float = NO_MORE_THAN_EAGER
    counted: Mapping[str, Call] = field(default_factory=dict)

    def seen(self, output: torch.Tensor) -> torch.Tensor:
        """An output as it is compared."""
        return output if self.compared is None else self.compared(output)


def compulsory_bytes(inputs: Inputs, output: torch.Tensor) -> int:
    """Bytes of every distinct input tensor read once plus the output written once."""
    tensors = {id(tensor): tensor.nbytes for tensor in inputs if isinstance(tensor, torch.Tensor)}
    return sum(tensors.values()) + output.nbytes


def error_fp64(output: torch.Tensor, oracle: torch.Tensor) -> float:
    """Relative RMS error ‖output − oracle‖ / ‖oracle‖; not finite where the output is not."""
    return float((output.double() - oracle).norm() / oracle.norm())


def fidelity_fault(
    contract: Contract,
    output: torch.Tensor,
    eager: torch.Tensor,
    oracle: torch.Tensor,
    times_eager: float = NO_MORE_THAN_EAGER,
) -> str | None:
    """How ``output`` breaks its contract against the eager output and the fp64 oracle, or None.

    ``same-precision``: error at most max(``times_eager`` × eager's, one unit in the last place of the output type).
    ``reduced`` declares its own bound in its tests; here it must only be finite, of the right shape and type.
    """
    if output.shape != eager.shape or output.dtype != eager.dtype:
        return f"expected {tuple(eager.shape)} {eager.dtype}, got {tuple(output.shape)} {output.dtype}"
    bad = int((~torch.isfinite(output) & torch.isfinite(eager)).sum())
    if bad:
        return f"{bad} of {output.numel()} elements are NaN or infinite where the eager chain's are finite"
    if contract == "bitwise" and not torch.equal(output, eager):
        differing = int((output != eager).sum())
        return f"contract bitwise: {differing} of {output.numel()} elements differ from the eager chain"
    if contract == "same-precision":
        error, limit = error_fp64(output, oracle), times_eager * error_fp64(eager, oracle)
        limit = max(limit, torch.finfo(output.dtype).eps)
        if not error <= limit:
            return f"contract same-precision: relative RMS error {error:.3g} against fp64, at most {limit:.3g} allowed"
    return None


@torch.no_grad()
def judge(contest: Contest, clock: Clock, environment: Environment, pairs: int = 50, seed: int = 0) -> MicroVerdict:
    """Judge one contest; ``seed`` orders the arms within pairs. Raises what the eager chain raises, and ValueError
    below 30 pairs; a fused call that raises or breaks its contract makes the verdict ``wrong``, without speeds.
    """
    device = next(value.device for value in contest.sets[0] if isinstance(value, torch.Tensor))
    runnable: dict[str, Call] = {EAGER: contest.eager}
    absent: dict[str, str] = {}
    for name, call in contest.baselines.items():
        if isinstance(call, str):
            absent[name] = call
        else:
            runnable[name] = call
    errors, moved = _baseline_errors(contest, runnable, absent)
    errors[VOXFUSE], wrong = _check(contest)
    samples: dict[str, tuple[float, ...]] = {}
    controls: dict[str, float] = {}
    if wrong is None:
        samples, controls, wrong = _time(contest, runnable, absent, clock, pairs, np.random.default_rng(seed))
    arms = [
        Arm(
            name=name,
            gpu_us=samples.get(name, ()),
            error_fp64=_finite(errors.get(name)),
            **_costs(
                call,
                contest.sets[0],
                device,
                wrong,
                contest.counted.get(name) or _capturable(name, call, clock),
            ),
        )
        for name, call in (*runnable.items(), (VOXFUSE, contest.voxfuse))
    ]
    arms += [Arm(name=name, absent=reason) for name, reason in absent.items()]
    arms += [Arm(name=name, gpu_us=samples[name]) for name in CONTROLS if name in samples]
    return recompute(
        MicroVerdict(
            fusion=contest.fusion.name,
            case=contest.case,
            environment=environment,
            arms=tuple(arms),
            ratios=(),
            aa_half_width=0.0,
            win_bar=MIN_BAR,
            controls=controls,
            ceilings=dict(contest.ceilings),
            bytes_moved=moved,
            flop=contest.flop,
            speed_of_light=None,
            wrong=wrong,
            measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors are filled with NaN, so an element that a kernel does not write cannot pass unseen."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _double(inputs: Inputs) -> Inputs:
    return tuple(value.double() if torch.is_tensor(value) and value.is_floating_point() else value for value in inputs)


def _baseline_errors(
    contest: Contest, runnable: dict[str, Call], absent: dict[str, str]
) -> tuple[dict[str, float], int]:
    """Error of every baseline on the first set, and the compulsory bytes; a baseline that raises becomes absent."""
    oracle = contest.seen(contest.eager(*_double(contest.sets[0])))
    output = contest.eager(*contest.sets[0])
    errors = {EAGER: error_fp64(contest.seen(output), oracle)}
    for name in [name for name in runnable if name != EAGER]:
        try:
            errors[name] = error_fp64(contest.seen(runnable[name](*contest.sets[0])), oracle)
        except Exception as error:  # whatever a peer or the compiler raises: the arm is absent, the contest goes on
            absent[name] = _reason(error)
            del runnable[name]
    return errors, compulsory_bytes(contest.sets[0], output)


def _check(contest: Contest, outputs: Sequence[Any] = ()) -> tuple[float, str | None]:
    """Worst error of the fused call over the checked sets, and what is wrong with it. ``outputs`` are judged where
    given; otherwise the call runs on poisoned memory."""
    worst = 0.0
    for index, inputs in enumerate(contest.sets[:CHECKED_SETS]):
        oracle, eager = contest.seen(contest.eager(*_double(inputs))), contest.seen(contest.eager(*inputs))
        try:
            with poisoned_memory():
                output = contest.seen(outputs[index] if outputs else contest.voxfuse(*inputs))
        except Exception as error:  # any failure of the fused call is a verdict, not a crash of the judge
            return float("nan"), f"the fused call raised {_reason(error)}"
        fault = fidelity_fault(contest.fusion.contract, output, eager, oracle, contest.times_eager)
        if fault is not None:
            return float("nan") if output.shape != oracle.shape else error_fp64(output, oracle), fault
        worst = max(worst, error_fp64(output, oracle))
    return worst, None


def _time(
    contest: Contest,
    runnable: dict[str, Call],
    absent: dict[str, str],
    clock: Clock,
    pairs: int,
    rng: np.random.Generator,
) -> tuple[dict[str, tuple[float, ...]], dict[str, float], str | None]:
    try:
        timed: dict[str, Timed] = {VOXFUSE: clock.prepare(contest.voxfuse, contest.sets)}
    except Exception as error:  # right when called, but not under capture
        return {}, {}, f"the fused call cannot be captured: {_reason(error)}"
    twin = clock.prepare(contest.voxfuse, contest.sets)
    samples = paired_samples(clock, {AA_FIRST: timed[VOXFUSE], AA_SECOND: twin}, pairs, rng)
    del twin
    delay_us = max(SLEEP_FLOOR_US, SLEEP_SHARE * float(np.median(samples[AA_FIRST])))
    delay = clock.delay(delay_us)

    def slowed(*inputs: Any) -> Any:
        output = contest.voxfuse(*inputs)
        delay()
        return output

    timed |= {NULL: clock.prepare(contest.eager, contest.sets), SLEEP: clock.prepare(slowed, contest.sets)}
    for name in list(runnable):
        try:
            timed[name] = clock.prepare(runnable[name], contest.sets)
        except Exception as error:  # as in _baseline_errors, but under capture
            if name == EAGER:
                raise
            absent[name] = _reason(error)
            del runnable[name]
    samples |= paired_samples(clock, timed, pairs, rng)
    _, wrong = _check(contest, timed[VOXFUSE].outputs)
    return samples, {"sleep_added_us": delay_us}, wrong and f"after timed replays: {wrong}"


def _capturable(name: str, call: Call, clock: Clock) -> Call | None:
    """What is timed by the wall is so since upstream cannot be captured; ours can, unless it is ``counted``."""
    return call if name == VOXFUSE or not isinstance(clock, WallClock) else None


def _costs(call: Call, inputs: Inputs, device: torch.device, wrong: str | None, counted: Call | None) -> dict[str, Any]:
    if wrong is not None:
        return {}
    return {
        "host_us": host_us(call, inputs, device),
        "launches": launches(counted, inputs, device) if counted is not None else None,
        "peak_bytes": peak_bytes(call, inputs, device),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _reason(error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line}"[:300]
