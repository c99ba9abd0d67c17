"""Verdicts for tests. Micro verdicts follow from the samples they carry, as those that the judge writes."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

from voxfuse import records
from voxfuse.recompute import AA_FIRST, AA_SECOND, EAGER, NULL, SLEEP, VOXFUSE, recompute
from voxfuse.records import Arm, Case, Environment, MicroVerdict, TensorSignature

H200 = Environment(
    gpu="NVIDIA H200",
    gpu_uuid_sha256=None,
    compute_capability="9.0",
    driver="570.0",
    torch="2.13.0",
    triton="3.7.1",
    python="3.11.7",
    platform="Linux",
    voxfuse="0.1.0",
    commit=None,
)
PAIRS = 30
NOISE = 0.003


def samples(us: float, seed: int, pairs: int = PAIRS) -> tuple[float, ...]:
    """Microseconds of an arm on a quiet GPU."""
    return tuple((us * np.exp(np.random.default_rng(seed).normal(0, NOISE, pairs))).tolist())


@functools.cache
def measured(eager_us: float = 20.0, voxfuse_us: float = 10.0, compile_us: float | None = 12.0) -> MicroVerdict:
    """A verdict of adain_snake on kokoro with those times; ``compile_us`` None: that arm is absent."""
    times = {EAGER: eager_us, VOXFUSE: voxfuse_us, AA_FIRST: voxfuse_us, AA_SECOND: voxfuse_us, NULL: eager_us}
    times[SLEEP] = voxfuse_us + max(5.0, 0.25 * voxfuse_us)
    arms = [Arm(name=name, gpu_us=samples(us, seed), error_fp64=1e-7) for seed, (name, us) in enumerate(times.items())]
    if compile_us is None:
        arms.append(Arm(name="compile", absent="Unsupported: no"))
    else:
        arms.append(Arm(name="compile", gpu_us=samples(compile_us, 99), error_fp64=1e-7))
    x = TensorSignature(shape=(1, 4, 1000), dtype="float32", strides=(4000, 1000, 1))
    return recompute(
        MicroVerdict(
            fusion="adain_snake",
            case=Case(name="large", stack="kokoro", tensors={"x": x}),
            environment=H200,
            arms=tuple(arms),
            ratios=(),
            aa_half_width=0.0,
            win_bar=0.03,
            controls={"sleep_added_us": times[SLEEP] - voxfuse_us},
            ceilings={"copy_bytes_per_s": 4e12, "launch_floor_us": 1.0},
            bytes_moved=32_000,
            speed_of_light=None,
            measured_at="2026-11-01T10:00:00+00:00",
        )
    )


def verdict(**changes: Any) -> MicroVerdict:
    """``measured()`` with other fields; for what its samples do not decide."""
    times = {name: changes.pop(name) for name in ("eager_us", "voxfuse_us", "compile_us") if name in changes}
    return msgspec.structs.replace(measured(**times), **changes)


HOPPER, ADA = "9.0", "8.9"
FUSION = records.Fusion(
    name="adain_snake",
    stacks=("kokoro",),
    operations=("snake",),
    contract="same-precision",
    envelope="fp32",
    kernels=("adain",),
)


TIMES = {"win": (20.0, 10.0), "neutral": (10.0, 10.0), "loss": (8.0, 10.0)}  # µs of eager and voxfuse


def environment(capability: str | None, gpu: str | None = "NVIDIA H200") -> records.Environment:
    return msgspec.structs.replace(H200, compute_capability=capability, gpu=gpu)


def micro(
    outcome: records.Comparison | None = "win",
    *,
    name: str = "large",
    bytes_moved: int = 32_000,
    capability: str | None = HOPPER,
    day: int = 1,
    gpu: str = "NVIDIA H200",
    **changes: Any,
) -> records.MicroVerdict:
    """A verdict with the given outcome against eager (None: not compared), and a win against torch.compile."""
    made = measured(*TIMES[outcome or "win"], 15.0)
    ratios = tuple(ratio for ratio in made.ratios if outcome is not None or ratio.baseline != "eager")
    assert bytes_moved <= 32_000, "one launch is the floor, so that the speed of light stays what it is"
    signature = records.TensorSignature(shape=(1, bytes_moved), dtype="float32", strides=(bytes_moved, 1))
    case = records.Case(name=name, stack="kokoro", tensors={"x": signature})
    fields = {"case": case, "environment": environment(capability, gpu), "measured_at": f"2026-11-{day:02d}T10:00:00Z"}
    return msgspec.structs.replace(made, **(fields | {"ratios": ratios, "bytes_moved": bytes_moved} | changes))


GUARD = records.Guard(name="WER ceiling", value=1.0, limit=6.0, outcome="pass")
RECEIPT = records.Receipt(
    fusion=FUSION.name, stack="kokoro", target="m:C.forward", count=1, status="applied", backend="triton", process_id=1
)


def gate(
    verdict: records.GateOutcome = "pass", *, capability: str | None = HOPPER, day: int = 1, **changes: Any
) -> records.GateVerdict:
    record = records.GateVerdict(
        protocol="full",
        protocol_sha256="0" * 64,
        stack="kokoro",
        stack_version="0.9.4",
        weights="kokoro-v1.0 sha256:0",
        asr="tiny.en",
        normalizer_sha256=None,
        fusions=(FUSION.name, "other"),
        environment=environment(capability),
        workload={},
        repetitions=10,
        metrics=(),
        guards=(GUARD,),
        receipts=(RECEIPT,),
        utterances=(),
        verdict=verdict,
        reasons=("WER",),
        measured_at=f"2026-11-{day:02d}T12:00:00Z",
    )
    return msgspec.structs.replace(record, **changes)
