"""Micro verdicts that follow from the samples they carry, in milliseconds: what the judge would have written."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np

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
