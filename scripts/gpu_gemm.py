"""skinny_gemm on one GPU in under 90 s: fidelity against fp64, rows that depend on no other, then µs against cuBLAS.

    python scripts/gpu_gemm.py               # needs a CUDA GPU; exits with 1 where a kernel is wrong
    python scripts/gpu_gemm.py --tiny        # small shapes in Triton's interpreter on the CPU, to check the script

µs are medians of CUDA graph replays, per call: "warm" with one weight, "cold" over so many weights that none stays in
the L2 cache, which is what a model's weights are. "cuBLAS" is what decode_step runs without skinny_gemm: the norm's own
kernel, F.linear, swiglu's own kernel. Then a whole decode step with each, and the lines for MOST_ROWS.
"""

# ruff: noqa: E402 - the interpreter is chosen before Triton is imported
from __future__ import annotations

import os
import sys

TINY = "--tiny" in sys.argv[1:]
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from decode_cases import BEGIN, DEVICE, EPS, MODELS, RUN, double, error, gpu_us, host_us, normal
from gemm_step import Key, decode_steps, predictor_times

import voxfuse
from voxfuse.kernels._op import TALLIES
from voxfuse.kernels._skinny_choice import GATED, LINEAR, type_class
from voxfuse.kernels._tuned import capability_of, trying
from voxfuse.kernels.rmsnorm import rms_norm
from voxfuse.kernels.skinny_gemm import shape_class, skinny_linear, skinny_swiglu
from voxfuse.kernels.swiglu import swiglu

ORDER = "cast_then_scale"
UNTIL_S = 82.0  # from the start, at which no further measurement begins
COLD_BYTES = 200 * 2**20  # four times an H200's L2 cache
MOST_COPIES, WARM_CALLS, WORKERS = 100, 20, 12
READ_BYTES_PER_S = 3.4e12  # what reading alone reaches on an H200 where a copy reaches 4.2e12
BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = MODELS if TINY else {**MODELS, "Qwen3-1.7B": (2048, 6144, 16, 8, 128, True)}
OPTIONS = ("num_warps", "block_k", "block_n", "num_stages", "programs")
CANDIDATES = {  # by operation and shape class, beside the table's own
    (LINEAR, "half 1024"): ((4, 128, 8, 3, 8), (8, 128, 16, 3, 4), (8, 128, 8, 2, 8), (8, 128, 8, 3, 2)),
    (GATED, "half 1024"): ((4, 128, 8, 3, 8), (8, 128, 16, 2, 2), (8, 128, 8, 2, 8), (8, 128, 8, 2, 3)),
    (LINEAR, "half 8192"): ((8, 64, 8, 4, 4), (8, 128, 8, 4, 2), (16, 64, 8, 4, 2), (16, 128, 8, 3, 1)),
    (LINEAR, "fp32 1024"): ((8, 64, 8, 2, 4), (4, 64, 8, 3, 8), (8, 32, 8, 4, 8)),
    (GATED, "fp32 1024"): ((8, 64, 8, 2, 2), (4, 64, 8, 3, 4), (8, 32, 8, 4, 8)),
    (LINEAR, "fp32 8192"): ((8, 64, 8, 3, 2), (8, 32, 8, 6, 4), (16, 32, 8, 4, 2)),
}


class Projection(NamedTuple):
    """One product of a decoder: [N, K] weights (two with ``gated``), ``normed`` before or a residual behind."""

    name: str
    outputs: int
    inputs: int
    normed: bool
    gated: bool = False
    bias: bool = False

    @property
    def operation(self) -> str:
        return GATED if self.gated else LINEAR

    def copies(self, dtype: torch.dtype) -> int:
        size = self.outputs * self.inputs * dtype.itemsize * (1 + self.gated)
        return 2 if TINY else min(max(COLD_BYTES // size, 2) + 1, MOST_COPIES)

    def bytes(self, dtype: torch.dtype) -> int:
        return self.outputs * self.inputs * dtype.itemsize * (1 + self.gated)


class Case(NamedTuple):
    """What is timed together, of one model."""

    model: str
    dtypes: Sequence[torch.dtype]
    rows: Sequence[int]
    names: Sequence[str]


ALL = ("QKV", "output", "gate and up", "down")
CASES = (
    [Case("tiny", (BF16, FP32), (1, 3), (*ALL, "head"))]
    if TINY
    else [
        Case("Qwen2-0.5B", (BF16, FP32), (1, 2, 4, 8, 16), ALL),
        Case("Qwen2-0.5B", (BF16,), (1, 16), ("head",)),
        Case("Qwen3-0.6B", (BF16,), (1, 4, 16), ALL),
        Case("Llama T3", (FP32,), (1, 2, 16), ALL),
        Case("Qwen3-1.7B", (BF16,), (1, 4, 16), ALL),
    ]
)


def projection(model: str, name: str) -> Projection:
    hidden, inner, q_heads, kv_heads, head_dim, _ = SHAPES[model]
    return {
        "QKV": Projection("QKV", (q_heads + 2 * kv_heads) * head_dim, hidden, True, bias=model.startswith("Qwen2")),
        "output": Projection("output", hidden, q_heads * head_dim, False),
        "gate and up": Projection("gate and up", inner, hidden, True, gated=True),
        "down": Projection("down", hidden, inner, False),
        "head": Projection("head", 61 if TINY else 6761, hidden, True),
    }[name]


def arguments(of: Projection, rows: int, dtype: torch.dtype, copies: int) -> list[tuple[Any, ...]]:
    """Arguments of skinny_linear or skinny_swiglu: one set a weight, all else shared."""
    x, width = normal(rows, 1, of.inputs, dtype=dtype), of.outputs * (1 + of.gated)
    norm = normal(of.inputs, dtype=dtype, around=1.0) if of.normed else None
    bias = normal(of.outputs, dtype=dtype) if of.bias else None
    residual = None if of.normed else normal(rows, 1, of.outputs, dtype=dtype)
    sets = []
    for _ in range(copies):
        weight = (torch.randn(width, of.inputs, device=DEVICE) * of.inputs**-0.5).to(dtype)
        heads = (*weight.chunk(2), None, None) if of.gated else (weight, bias, residual)
        sets.append((x, *heads, norm, EPS, ORDER))
    return sets


def ours(sets: list[tuple[Any, ...]], gated: bool) -> Callable[[], Any]:
    op, turn = skinny_swiglu if gated else skinny_linear, itertools.cycle(sets)
    return lambda: op(*next(turn), run=RUN)


def cublas(sets: list[tuple[Any, ...]], gated: bool) -> Callable[[], Any]:
    """As decode_step without skinny_gemm: a residual waits for the next norm's kernel."""
    turn = itertools.cycle(sets)

    def call() -> Any:
        x, weight, other, *_, norm, eps, order = next(turn)
        x = x if norm is None else rms_norm(x, norm, eps, order, run=RUN)
        if not gated:
            return F.linear(x, weight, other)
        both = torch.as_strided(
            weight, (2 * weight.shape[0], weight.shape[1]), weight.stride(), weight.storage_offset()
        )
        return swiglu(*F.linear(x, both).chunk(2, dim=-1), run=RUN)

    return call


def variants() -> Iterator[tuple[Projection, int, torch.dtype, tuple[int, ...] | None]]:
    """Every kernel that is needed, each to be compiled once."""
    seen = set()
    for case in CASES:
        for name, dtype, rows in itertools.product(case.names, case.dtypes, case.rows):
            of = projection(case.model, name)
            for options in (None, *(candidates(of, dtype) if case is CASES[0] and rows in (1, 16) else ())):
                key = of._replace(name="", outputs=of.outputs % 16), rows, dtype, options
                if key not in seen:
                    seen.add(key)
                    yield of, rows, dtype, options


def candidates(of: Projection, dtype: torch.dtype) -> tuple[tuple[int, ...], ...]:
    return CANDIDATES.get((of.operation, shape_class(dtype, of.inputs)), ())


def with_options(of: Projection, dtype: torch.dtype, options: tuple[int, ...] | None) -> Any:
    if options is None:
        return nullcontext()
    table = dict(zip(OPTIONS, options, strict=True))
    return trying(of.operation, shape_class(dtype, of.inputs), DEVICE, table)


def compile_some(part: list[tuple[Projection, int, torch.dtype, tuple[int, ...] | None]]) -> list[str]:
    """In a process of its own: Triton's cache on disk then has them."""
    faults = []
    for of, rows, dtype, options in part:
        try:
            with torch.no_grad(), with_options(of, dtype, options):
                ours(arguments(of, rows, dtype, 1), of.gated)()
        except Exception as fault:
            faults.append(f"{of} {rows} rows {dtype} {options}: {type(fault).__name__}: {str(fault)[:200]}")
    return faults


def compile_all() -> list[str]:
    wanted = list(variants())
    if TINY:
        return compile_some(wanted)
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        faults = pool.map(compile_some, [wanted[start::WORKERS] for start in range(WORKERS)])
    print(f"{len(wanted)} kernels compiled, {time.monotonic() - BEGIN:.0f} s")
    return list(itertools.chain.from_iterable(faults))


def fidelity() -> Iterator[str]:
    """Errors against fp64 at every shape and type of the first case, and rows that are the same in any company."""
    print("\nrelative RMS error against fp64: ours, cuBLAS' chain (at most 1.25 × that, or one unit in the last place)")
    for case in CASES:
        for name, dtype in itertools.product(case.names, case.dtypes):
            of = projection(case.model, name)
            op = skinny_swiglu if of.gated else skinny_linear
            most = max(case.rows)
            (full,) = arguments(of, most, dtype, 1)
            y, eager, exact = op(*full, run=RUN), op.reference(*full), op.reference(*double(full))
            mine, theirs = error(y, exact), error(eager, exact)
            label = f"{case.model} {name} {of.outputs}x{of.inputs} {str(dtype)[6:]}"
            print(f"  {label:48} {mine:.2e} {theirs:.2e}")
            if not mine <= max(1.25 * theirs, torch.finfo(dtype).eps):
                yield f"{label}: error {mine:.2e}, eager {theirs:.2e}"
            if not torch.equal(y, op(*full, run=RUN)):
                yield f"{label}: two equal calls differ"
            for rows in case.rows[:-1]:
                fewer = [value[:rows] if torch.is_tensor(value) and value.dim() == 3 else value for value in full]
                if not TINY and not torch.equal(op(*fewer, run=RUN), y[:rows]):
                    differ = float((op(*fewer, run=RUN) != y[:rows]).float().mean())
                    yield f"{label}: {differ:.1%} of the elements of {rows} rows are others among {most} rows"


def late() -> bool:
    return not TINY and time.monotonic() - BEGIN > UNTIL_S


def table(most_rows: dict[Key, int]) -> None:
    print(f"\nµs a call; share of reading the weights at {READ_BYTES_PER_S / 1e12} TB/s")
    heading = (
        f"{'':44} {'ours warm':>9} {'cold':>7} {'of read':>7} | {'cuBLAS warm':>11} {'cold':>7} | {'linear cold':>11}"
    )
    print(heading)
    for case in CASES:
        for dtype, name in itertools.product(case.dtypes, case.names):
            of, winning = projection(case.model, name), True
            for rows in case.rows:
                if late():
                    print("not reached")
                    return
                copies = of.copies(dtype)
                sets = arguments(of, rows, dtype, copies)
                mine = [gpu_us(ours(sets[:1], of.gated), WARM_CALLS), gpu_us(ours(sets, of.gated), copies)]
                theirs = [gpu_us(cublas(sets[:1], of.gated), WARM_CALLS), gpu_us(cublas(sets, of.gated), copies)]
                turn = itertools.cycle(sets)
                alone = gpu_us(lambda: F.linear(*next(turn)[:2]), copies)  # noqa: B023
                share = of.bytes(dtype) / READ_BYTES_PER_S * 1e6 / mine[1]
                label = f"{case.model} {name} {of.outputs}x{of.inputs} {str(dtype)[6:]} {rows} rows"
                print(
                    f"{label:44} {mine[0]:9.2f} {mine[1]:7.2f} {share:7.0%} | {theirs[0]:11.2f} {theirs[1]:7.2f} | "
                    f"{alone:11.2f}  {theirs[1] / mine[1]:5.2f}× {'skinny' if mine[1] < theirs[1] else 'cuBLAS'}",
                    flush=True,
                )
                key = capability_of(sets[0][0].device), of.operation, type_class(dtype), of.outputs, of.inputs
                winning = winning and mine[1] < 0.97 * theirs[1]
                most_rows[key] = max(most_rows.get(key, 0), rows) if winning else most_rows.get(key, 0)


def options_table() -> None:
    print(f"\nlaunch options of {CASES[0].model}, cold µs at each number of rows: {', '.join(OPTIONS)}")
    for dtype, name in itertools.product(CASES[0].dtypes, CASES[0].names):
        of = projection(CASES[0].model, name)
        for options in (None, *candidates(of, dtype)):
            if late():
                print("not reached")
                return
            times = []
            for rows in (CASES[0].rows[0], CASES[0].rows[-1]):
                copies = of.copies(dtype)
                try:
                    with with_options(of, dtype, options):
                        times.append(f"{gpu_us(ours(arguments(of, rows, dtype, copies), of.gated), copies):7.2f}")
                except Exception as fault:  # options that this GPU has no room for
                    times.append(type(fault).__name__)
            label = f"{of.operation} {shape_class(dtype, of.inputs)} ({name})"
            print(f"  {label:40} {options or 'as in the table'!s:24} {' '.join(times)}", flush=True)


@torch.no_grad()
def main() -> int:
    torch.manual_seed(0)
    name = "CPU, interpreter" if TINY else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, voxfuse {voxfuse.__version__}")
    faults = [*compile_all(), *fidelity()]
    faults += [f"fell back: {reason} ({count}×)" for reason, count in TALLIES.of(RUN.receipt).fallbacks.items()]
    print(f"fidelity: {len(faults)} faults, {time.monotonic() - BEGIN:.0f} s")
    for fault in faults[:40]:
        print(f"  WRONG {fault}")
    most_rows: dict[Key, int] = {}
    table(most_rows)
    decode_steps({key: rows for key, rows in most_rows.items() if rows}, late)
    predictor_times()
    options_table()
    (one,) = arguments(projection(CASES[0].model, "QKV"), 1, CASES[0].dtypes[0], 1)
    print(f"\nhost µs of an eager call: {host_us(lambda: skinny_linear(*one, run=RUN)):.0f}")
    print("MOST_ROWS, by cold weights and 3 % at the least:")
    for key, rows in sorted(most_rows.items()):
        if rows:
            print(f"    {key}: {rows},")
    print(f"\n{time.monotonic() - BEGIN:.0f} s in all")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
