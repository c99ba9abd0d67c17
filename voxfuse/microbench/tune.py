"""``voxfuse bench --tune``: launch options found off line, written into the table that the kernels read.

For every shape class of an operation, every candidate runs on that class's shape: first its error (a wrong candidate is
never timed), then all candidates interleaved with what the table holds now. The fastest replaces the incumbent where
the lower end of its paired ratio lies above 1 + 3 %, so that noise does not rewrite the table. A new operation adds one
entry to ``TUNABLE``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from voxfuse.fusions.registry import FUSIONS
from voxfuse.kernels import adain, skinny_gemm
from voxfuse.kernels._op import FusedOp, Run
from voxfuse.kernels._tuned import Row, capability_of, options, trying
from voxfuse.kernels.skinny_gemm import skinny_linear, skinny_swiglu
from voxfuse.microbench.arms import around, smooth
from voxfuse.microbench.ceilings import rotation
from voxfuse.microbench.judge import compulsory_bytes, error_fp64, fidelity_fault
from voxfuse.microbench.timer import Clock, Inputs, Timed, paired_samples
from voxfuse.recompute import MIN_BAR, ratio_interval
from voxfuse.records import Environment, TensorSignature

INCUMBENT = "incumbent"


class Tunable(NamedTuple):
    """How an operation is tuned: per shape class its inputs (on the generator's device), and its candidates."""

    op: FusedOp
    classes: Mapping[str, Callable[[torch.Generator], Inputs]]
    candidates: Callable[[str], list[dict[str, int]]]
    fusions: tuple[str, ...]  # that use the operation


class Tuned(NamedTuple):
    """What came of one shape class. ``row`` is None where the incumbent stays; ``refused`` says why by candidate."""

    shape_class: str
    row: Row | None
    incumbent: dict[str, int]
    microseconds: dict[str, float]
    refused: dict[str, str]


def _adain_inputs(rows: int, channels: int, frames: int, generator: torch.Generator) -> Inputs:
    def contiguous(*shape: int) -> TensorSignature:
        strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        return TensorSignature(shape=shape, dtype="float32", strides=strides)

    return (
        smooth(contiguous(rows, channels, frames), generator),
        around(0.0, 0.3, contiguous(rows, 2 * channels), generator),
        around(1.0, 0.1, contiguous(channels), generator),
        around(0.0, 0.1, contiguous(channels), generator),
        around(0.0, 0.3, contiguous(channels), generator).exp(),
        None,
        1e-5,
        0.0,
    )


# Rows, channels and frames at which each class is tuned: those of Kokoro where it has one in the class.
_ADAIN_SHAPES = {
    "resident 128": (1, 1090, 120),
    "resident 256": (1, 512, 240),
    "resident 512": (1, 1090, 400),
    "resident 1024": (1, 512, 800),
    "resident 2048": (1, 256, 2000),
    "resident 4096": (1, 256, 2400),
    "resident 8192": (8, 256, 8000),
    adain.STREAMING: (1, 128, 48_001),
}


def _adain_candidates(shape_class: str) -> list[dict[str, int]]:
    block = adain.STREAM_FRAMES if shape_class == adain.STREAMING else int(shape_class.split()[1])
    warps = [warps for warps in (1, 2, 4, 8, 16, 32) if 2 <= block // (32 * warps) <= 64]  # elements a thread
    plain = [{"num_warps": count} for count in warps]
    limited = itertools.product(plain, (64, 80, 128)) if block == adain.RESIDENT_FRAMES else ()
    return plain + [{**base, "maxnreg": limit} for base, limit in limited if base["num_warps"] <= 16]


def _projection_inputs(inputs: int, dtype: torch.dtype, gated: bool, generator: torch.Generator) -> Inputs:
    """One row, normed, and what a decoder of that width has behind it: 1.25 times as many outputs."""
    device, width = generator.device, inputs * 5 // 4

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    x, norm = drawn(1, 1, inputs), 1.0 + drawn(inputs, scale=0.3)
    gate, up = (drawn(width, inputs, scale=inputs**-0.5) for _ in range(2))
    weights = (gate, up, None, None) if gated else (gate, None, drawn(1, 1, width))
    return x, *weights, norm, 1e-6, "cast_then_scale"


def _projection_candidates(shape_class: str) -> list[dict[str, int]]:
    blocks = (32, 64) if shape_class.startswith("fp32") else (64, 128)
    sizes = [*itertools.product((4, 8, 16), blocks, (8,)), (8, blocks[-1], 16)]
    return [
        {"num_warps": warps, "block_k": block_k, "block_n": block_n, "num_stages": stages, "programs": programs}
        for (warps, block_k, block_n), (stages, programs) in itertools.product(sizes, ((2, 8), (3, 4)))
    ]


def _projection(op: FusedOp) -> Tunable:
    types = (torch.float32, torch.bfloat16)
    classes = {
        skinny_gemm.shape_class(dtype, inputs): partial(_projection_inputs, inputs, dtype, op is skinny_swiglu)
        for dtype, inputs in itertools.product(types, skinny_gemm.CLASSES)
    }
    return Tunable(op, classes, _projection_candidates, ("skinny_gemm",))


TUNABLE: dict[str, Tunable] = {
    adain.OPERATION: Tunable(
        adain.adain_act,
        {name: partial(_adain_inputs, *shape) for name, shape in _ADAIN_SHAPES.items()},
        _adain_candidates,
        ("adain_snake", "adain_leaky_relu"),
    ),
    skinny_gemm.LINEAR: _projection(skinny_linear),
    skinny_gemm.GATED: _projection(skinny_swiglu),
}


def operations_of(fusions: tuple[str, ...]) -> list[str]:
    """The tunable operations of some fusions (all for none). Raises KeyError where none of them has one."""
    found = [name for name, tunable in TUNABLE.items() if not fusions or set(fusions) & set(tunable.fusions)]
    if not found:
        known = ", ".join(sorted({name for tunable in TUNABLE.values() for name in tunable.fusions}))
        raise KeyError(f"nothing to tune for {', '.join(fusions)}; fusions with an entry in TUNABLE: {known}")
    return found


@torch.no_grad()
def tune(
    operation: str, clock: Clock, device: torch.device, run: Run, environment: Environment, pairs: int = 30
) -> Iterator[Tuned]:
    """Tune every shape class of an operation on a device; nothing is written."""
    tunable = TUNABLE[operation]
    for shape_class, make in tunable.classes.items():
        yield tune_class(operation, tunable, shape_class, make, clock, device, run, environment, pairs)


def tune_class(
    operation: str,
    tunable: Tunable,
    shape_class: str,
    make: Callable[[torch.Generator], Inputs],
    clock: Clock,
    device: torch.device,
    run: Run,
    environment: Environment,
    pairs: int,
) -> Tuned:
    """Tune one shape class; ``make`` draws its inputs. Raises RuntimeError where the table's own options are wrong."""
    generator = torch.Generator(device).manual_seed(0)
    first = make(generator)
    count = rotation(compulsory_bytes(first, tunable.op.reference(*first)), device)
    sets = [first, *(make(generator) for _ in range(count - 1))]
    call = partial(tunable.op, run=run)
    incumbent = dict(options(operation, shape_class, device))
    candidates = {INCUMBENT: incumbent} | {
        _name(candidate): candidate for candidate in tunable.candidates(shape_class) if candidate != incumbent
    }
    timed: dict[str, Timed] = {}
    refused: dict[str, str] = {}
    for name, candidate in candidates.items():
        with trying(operation, shape_class, device, candidate):
            fault = _fault(tunable, call, first)
            if fault is None:
                timed[name] = clock.prepare(call, sets)  # a graph keeps the options that it was captured with
            else:
                refused[name] = fault
    if INCUMBENT not in timed:
        raise RuntimeError(f"{operation}, {shape_class}: the options in the table are wrong: {refused[INCUMBENT]}")
    samples = {
        name: np.asarray(values)
        for name, values in paired_samples(clock, timed, pairs, np.random.default_rng(0)).items()
    }
    microseconds = {name: float(np.median(values)) for name, values in samples.items()}
    best = min(microseconds, key=microseconds.__getitem__)
    row = None
    if best != INCUMBENT and ratio_interval(samples[INCUMBENT], samples[best])[1] > 1 + MIN_BAR:
        row = Row(
            operation=operation,
            shape_class=shape_class,
            compute_capability=capability_of(device) or "*",
            options=candidates[best],
            measured={
                "gpu": environment.gpu or "CPU",
                "torch": environment.torch,
                "triton": environment.triton or "none",
                "us": round(microseconds[best], 3),
                "us_before": round(microseconds[INCUMBENT], 3),
            },
        )
    return Tuned(shape_class, row, incumbent, microseconds, refused)


def _fault(tunable: Tunable, call: Callable[..., Any], inputs: Inputs) -> str | None:
    """Why a candidate must not be timed: it raises, or breaks the strictest contract of the operation's fusions."""
    eager = tunable.op.reference(*inputs)
    oracle = tunable.op.reference(*(v.double() if torch.is_tensor(v) else v for v in inputs))
    try:
        output = call(*inputs)
    except Exception as error:  # a candidate that does not compile is no candidate
        return f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:200]
    contracts = {FUSIONS[name].contract for name in tunable.fusions}
    for contract in contracts:
        if (fault := fidelity_fault(contract, output, eager, oracle)) is not None:
            return f"{fault} (error {error_fp64(output, oracle):.2g})"
    return None


def _name(candidate: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in candidate.items())
