"""Step ``checks``: the tests that need the GPU alone, the kernel tests on it, then AdaIN directly over awkward sizes,
strides, types and lengths.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from gpu_suite_state import NOT_REACHED, REPOSITORY, Row, Suite
from gpu_tests import ALONE

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.adain import adain_act
from voxfuse.microbench.judge import error_fp64, fidelity_fault, poisoned_memory

FRAMES = (2, 15, 16, 17, 127, 129, 1000, 4095, 4096, 4097, 8191, 8192, 8193, 48_001)
ROWS_CHANNELS = ((1, 32), (1, 128), (2, 33), (3, 64), (33, 5))  # coefficients round once a channel: an RMS needs some
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)
LAYOUTS = ("contiguous", "channels last", "every second frame", "a slice of a wider tensor", "one row expanded")
DATA = ("ordinary", "far from zero", "tiny", "constant")


def run(suite: Suite) -> Iterator[Row]:
    """A row for the tests marked gpu that time something, one for the kernel tests (which run on either), one for the
    sweep, and one for each of its faults (ten at most)."""
    yield _pytest(suite, "pytest-alone", ["-m", "gpu", *ALONE])
    kernels = "tests/kernels/test_rounding.py" if suite.dry else "tests/kernels"
    yield _pytest(suite, "pytest-kernels", [kernels, "-m", "not gpu and not aot"])
    yield from _sweep(suite)


def _pytest(suite: Suite, name: str, arguments: list[str]) -> Row:
    result = suite.saved(name)
    title = "pytest " + " ".join(arguments[:2])
    if result is None:
        if suite.left() < 60:
            return Row(title, NOT_REACHED, "missing")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *arguments]
        environment = os.environ if suite.dry else os.environ | {"VOXFUSE_TEST_GPU": "1"}
        limit = max(30.0, suite.left() - 30)
        try:
            ran = subprocess.run(
                command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit, env=environment
            )
        except subprocess.TimeoutExpired:
            return Row(title, NOT_REACHED, "missing")
        result = {"status": ran.returncode, "output": (ran.stdout + ran.stderr)[-20_000:]}
        if ran.returncode == 0 or suite.dry:
            suite.save(name, result)  # red tests run again next time
        else:
            print(result["output"], flush=True)
    last_line = result["output"].strip().splitlines()[-1]
    return Row(title, last_line, "ok" if result["status"] in (0, 5) else "wrong")


def _values(data: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if data == "far from zero":
        return noise + 300.0
    if data == "tiny":
        return noise * 1e-4
    return torch.full_like(noise, 0.75) if data == "constant" else noise


def _laid_out(layout: str, values: torch.Tensor) -> torch.Tensor:
    rows, channels, frames = values.shape
    if layout == "channels last":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every second frame":
        wide = values.new_full((rows, channels, 2 * frames), float("nan"))
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "a slice of a wider tensor":
        wide = values.new_full((rows, channels + 2, frames + 3), float("nan"))
        wide[:, 1:-1, 2:-1] = values
        return wide[:, 1:-1, 2:-1]
    return values[:1].expand(rows, channels, frames) if layout == "one row expanded" else values


def _calls(suite: Suite) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Every size in fp32, and every type, layout and kind of data at a few sizes; each with both activations, with and
    without a length per row."""
    sizes = [(rows, channels, frames) for (rows, channels), frames in itertools.product(ROWS_CHANNELS, FRAMES)]
    few = [(2, 33, 17), (33, 5, 4097), (2, 128, 48_001)]
    if suite.dry:
        sizes, few = sizes[:2], few[:1]
    ordinary = (DTYPES[0], LAYOUTS[0], DATA[0])
    plans = [(size, *ordinary) for size in sizes]
    plans += [(size, dtypes, *ordinary[1:]) for size in few for dtypes in DTYPES[1:]]
    plans += [(size, dtypes, layout, DATA[0]) for size in few for dtypes in DTYPES[:2] for layout in LAYOUTS[1:]]
    plans += [(size, *ordinary[:2], data) for size in few for data in DATA[1:]]
    generator = torch.Generator(suite.device).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=suite.device)

    for ((rows, channels, frames), (dtype, other), layout, data), snake, ragged in itertools.product(
        plans, (True, False), (False, True)
    ):
        x = _laid_out(layout, _values(data, (rows, channels, frames), generator).to(dtype))
        style = (0.3 * normal(rows, 2 * channels)).to(other)
        weight, bias = (1 + 0.1 * normal(channels)).to(dtype), (0.1 * normal(channels)).to(dtype)
        alpha = (0.3 * normal(channels)).exp().to(other) if snake else None
        lengths = None
        if ragged:
            lengths = torch.randint(2, frames + 1, (rows,), generator=generator, device=suite.device)
            lengths[0] = frames
        name = (
            f"{rows}x{channels}x{frames} {dtype} {other} {layout}, {data}, {'snake' if snake else 'leaky'}"
            f"{', lengths' if ragged else ''}"
        )
        yield name.replace("torch.", ""), (x, style, weight, bias, alpha, lengths, 1e-5, 0.2)


@torch.no_grad()
def _sweep(suite: Suite) -> Iterator[Row]:
    result = suite.saved("sweep")
    if result is None:
        faults, count, worst = [], 0, 0.0
        before = TALLIES.of(suite.run.receipt).calls
        for name, arguments in _calls(suite):
            if suite.left() < 20:
                yield Row("AdaIN sweep", f"{count} calls, then: {NOT_REACHED}", "missing")
                return
            double = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
            oracle, eager = adain_act.reference(*double), adain_act.reference(*arguments)
            with poisoned_memory():
                output = adain_act(*arguments, run=suite.run)
            fault = fidelity_fault("same-precision", output, eager, oracle)
            count += 1
            if fault is not None:
                faults.append(f"{name}: {fault}; eager {error_fp64(eager, oracle):.3g}")
            elif output.dtype == torch.float32:
                floor = max(error_fp64(eager, oracle), torch.finfo(torch.float32).eps)
                worst = max(worst, error_fp64(output, oracle) / floor)
        fused = TALLIES.of(suite.run.receipt).calls - before
        if fused != count:
            faults.append(f"only {fused} of {count} calls ran fused: {dict(TALLIES.of(suite.run.receipt).fallbacks)}")
        result = {"calls": count, "worst_fp32_error_over_eager": worst, "faults": faults}
        if not faults:
            suite.save("sweep", result)  # a red sweep runs again next time
    outcome = "wrong" if result["faults"] else "ok"
    worst = result["worst_fp32_error_over_eager"]
    text = f"{result['calls']} calls, {len(result['faults'])} faults, fp32 error at most {worst:.2f} of eager's"
    yield Row("AdaIN sweep", text, outcome)
    for fault in result["faults"][:10]:
        yield Row("AdaIN sweep", fault, "wrong")
