"""The decode kernels on one GPU in under 100 s: fidelity against fp64 over the real shapes, GPU time against eager,
SDPA, torch.compile and Liger, and one decode step of a Qwen2-0.5B with random weights: untouched, patched, fused
(``decode_step``), fused in a CUDA graph (``decode_graph``).

    python scripts/gpu_decode.py            # needs a CUDA GPU; exits with 1 where a kernel is wrong
    python scripts/gpu_decode.py --tiny      # small shapes in Triton's interpreter on the CPU, to check the script

GPU times are medians of CUDA graph replays with warm caches, per call, in µs. Nothing is written; no verdict follows.
"""

# ruff: noqa: E402 - the interpreter is chosen before Triton is imported
from __future__ import annotations

import os
import sys

TINY = "--tiny" in sys.argv[1:]
if TINY:
    os.environ["TRITON_INTERPRET"] = "1"

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from decode_cases import (
    BEGIN,
    COMPILE_UNTIL_S,
    CONTEXTS,
    DEVICE,
    DTYPES,
    HALF_AND_FULL,
    MODELS,
    ROWS,
    RUN,
    TIMES_UNTIL_S,
    attention_case,
    double,
    error,
    gpu_us,
    host_us,
    norm_case,
    rope_case,
    swiglu_case,
)  # fmt: skip
from decode_models import fused_step, model_step

import voxfuse
from voxfuse.kernels._op import TALLIES, FusedOp
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope import qk_norm_rope
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.ras_sampler import ras_sample
from voxfuse.kernels.rmsnorm import add_rms_norm, rms_norm
from voxfuse.kernels.sampler import draw, sample
from voxfuse.kernels.swiglu import swiglu


def check(op: FusedOp, name: str, arguments: tuple[Any, ...], bitwise: bool = False) -> str | None:
    """The fault of one call, or None: above 1.25 × eager's error and a unit in the last place, or other bits."""
    value, eager, exact = op(*arguments, run=RUN), op.reference(*arguments), op.reference(*double(arguments))
    if isinstance(value, tuple):
        value, eager, exact = (torch.cat([part.flatten() for part in parts]) for parts in (value, eager, exact))
    ours, theirs = error(value, exact), error(eager, exact)
    worst = WORST.setdefault((op.name, value.dtype), [0.0, 0.0, 0.0])
    worst[0], worst[1] = max(worst[0], ours), max(worst[1], theirs)
    worst[2] = max(worst[2], float((value != eager).float().mean()))
    if bitwise and not torch.equal(value, eager):
        return f"{op.name} {name}: {int((value != eager).sum())} of {value.numel()} elements have other bits than eager"
    limit = max(1.25 * theirs, torch.finfo(value.dtype).eps)
    return None if ours <= limit else f"{op.name} {name}: error {ours:.2e}, eager {theirs:.2e}, at most {limit:.2e}"


WORST: dict[tuple[str, torch.dtype], list[float]] = {}


def fidelity() -> list[str]:
    faults: list[str | None] = []
    for model, dtype in itertools.product(MODELS, DTYPES):
        normed = MODELS[model][5]
        if dtype != torch.bfloat16 and model not in HALF_AND_FULL:
            continue  # each type and shape is compiled anew, and time is short
        for rows, tokens in ((1, 1), (2, 3)) if TINY else ((1, 1), (16, 1), (2, 130)):
            name = f"{model} {rows}×{tokens} {dtype}"
            x, weight, *rest = norm_case(model, rows, tokens, dtype)
            faults.append(check(rms_norm, name, (x, weight, *rest)))
            faults.append(check(add_rms_norm, name, (x, torch.randn_like(x), weight, *rest)))
            faults.append(check(swiglu, name, swiglu_case(model, rows, tokens, dtype)))
            # The CPU contracts nothing either, so that rope alone has eager's bits in both modes.
            faults.append(check(qk_norm_rope, name, rope_case(model, rows, tokens, dtype), bitwise=not normed))
        group = MODELS[model][2] // MODELS[model][3]
        shapes = ((1, 40, 1), (2, 40, 3)) if TINY else ((1, 1, 1), (1, 8192, 1), (16, 777, 1))
        for rows, context, tokens in (*shapes, *(() if TINY else ((2, 512, min(16, 128 // group)),))):
            name = f"{model} {rows} rows, {context} keys, {tokens} tokens {dtype}"
            faults.append(check(gqa_decode, name, attention_case(model, rows, context, dtype, tokens)))
    print(
        "\nlargest relative RMS error against fp64 (ours, eager), and largest share of elements that differ from eager"
    )
    for (op, dtype), (ours, theirs, differing) in sorted(WORST.items(), key=str):
        print(f"  {op:14} {str(dtype).removeprefix('torch.'):9} {ours:.2e} {theirs:.2e} {differing:8.2%}")
    return [fault for fault in faults if fault is not None]


def compiled(op: FusedOp, arguments: tuple[Any, ...]) -> Callable[[], Any] | None:
    if TINY or time.monotonic() - BEGIN > COMPILE_UNTIL_S:
        return None
    torch.compiler.reset()
    function = torch.compile(op.reference, dynamic=False, fullgraph=True)
    return lambda: function(*arguments)


def liger(op: FusedOp, arguments: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Liger's kernel where that package is installed and has one for this call."""
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return None
    if op is rms_norm:
        x, weight, eps, _ = arguments
        return lambda: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
    return (lambda: LigerSiLUMulFunction.apply(*arguments)) if op is swiglu else None


def line(name: str, arms: dict[str, Callable[[], Any] | None], ours: Callable[[], Any]) -> None:
    if not TINY and time.monotonic() - BEGIN > TIMES_UNTIL_S:
        print(f"{name:44} not reached")
        return
    mine = gpu_us(ours)
    text = f"{name:44} {mine:8.2f}"
    for arm, call in arms.items():
        if call is not None:
            try:
                other = gpu_us(call)
                text += f"  {arm} {other:8.2f} ({other / mine:4.2f}×)"
            except Exception as fault:  # a baseline that cannot be captured is not a fault of ours
                text += f"  {arm} {type(fault).__name__}"
    print(f"{text}  host {host_us(ours):.0f}", flush=True)


def pointwise_times() -> None:
    print("\nGPU µs a call (bf16): voxfuse, then each baseline with its ratio; host µs of an eager voxfuse call")
    cases = {rms_norm: norm_case, qk_norm_rope: rope_case, swiglu: swiglu_case}
    for (op, case), model in itertools.product(cases.items(), MODELS):
        for rows, tokens in ((1, 1),) if TINY else ((1, 1), (16, 1), (1, 512)):
            arguments = case(model, rows, tokens, torch.bfloat16)
            arms = {"eager": lambda: op.reference(*arguments)}  # noqa: B023
            if tokens == 1 and rows == 1 and model in ("Qwen3-0.6B",):
                arms["compile"] = compiled(op, arguments)
            arms["Liger"] = liger(op, arguments)
            line(f"{op.name} {model} {rows}×{tokens}", arms, lambda: op(*arguments, run=RUN))  # noqa: B023


def sampler_times() -> None:
    print("\nsamplers (fp32 scores, one row), against their references in plain torch")
    for vocabulary in (300,) if TINY else (3072, 6761, 16384):
        scores = torch.randn(1, vocabulary, device=DEVICE)
        noise, recent = draw(scores), torch.full((1, 10), -1, device=DEVICE)
        hf = (scores, None, noise, 0.8, 50, 0.9, 1.0)
        ras = (scores, recent, draw(scores[:, :25]), noise, 0.8, 1.0, True)
        for op, arguments in ((sample, hf), (ras_sample, ras)):
            eager = {"eager": lambda: op.reference(*arguments)}  # noqa: B023
            line(f"{op.name} {vocabulary}", eager, lambda: op(*arguments, run=RUN))  # noqa: B023


def attention_times() -> None:
    print("\ngqa_decode (bf16, full caches): SDPA with enable_gqa, SDPA with repeated keys, the eager chain")
    for model, rows, context in itertools.product(MODELS, ROWS, CONTEXTS):
        q, k, v, lengths, _, scale, _, _ = attention_case(model, rows, context, torch.bfloat16)
        lengths.fill_(context)
        group = q.shape[1] // k.shape[1]

        def repeated() -> torch.Tensor:
            wide = (x.repeat_interleave(group, dim=1) for x in (k, v))  # noqa: B023
            return F.scaled_dot_product_attention(q, *wide, scale=scale)  # noqa: B023

        arms: dict[str, Callable[[], Any] | None] = {
            "SDPA gqa": lambda: F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True),  # noqa: B023
            "SDPA": repeated,
        }
        if context <= 512:
            arms["eager"] = lambda: gqa_decode.reference(q, k, v, None, None, scale, True, 0)  # noqa: B023
        line(
            f"gqa_decode {model} {rows} rows, {context} keys",
            arms,
            lambda: gqa_decode(q, k, v, lengths, None, scale, True, 0, run=RUN),  # noqa: B023
        )


def cached_step() -> Iterator[str]:
    """The cache-writing kernel against the plain one, bit for bit."""
    for model in MODELS:
        arguments = rope_case(model, 2, 1, torch.bfloat16)
        q, k = arguments[:2]
        v = torch.randn_like(k)
        caches = [torch.zeros(2, k.shape[2], 8, k.shape[3], device=DEVICE, dtype=k.dtype) for _ in range(2)]
        slots = torch.tensor([[3], [7]], device=DEVICE)
        queries = qk_norm_rope_cached(q, k, v, *caches, slots, *arguments[2:], run=RUN)
        both = qk_norm_rope(*arguments, run=RUN)
        written = torch.stack([caches[0][0, :, 3], caches[0][1, :, 7]])
        if not torch.equal(queries, both[:, :, : q.shape[2]]) or not torch.equal(written, both[:, 0, q.shape[2] :]):
            yield f"qk_norm_rope_cached {model}: queries or written keys differ from qk_norm_rope"


@torch.no_grad()
def main() -> int:
    torch.manual_seed(0)
    name = "CPU, interpreter" if TINY else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, voxfuse {voxfuse.__version__}")
    faults = [*fidelity(), *cached_step()]
    faults += [f"fell back: {reason} ({count}×)" for reason, count in TALLIES.of(RUN.receipt).fallbacks.items()]
    print(f"fidelity: {len(faults)} faults, {time.monotonic() - BEGIN:.0f} s")
    for fault in faults[:40]:
        print(f"  WRONG {fault}")
    fused_step()
    model_step()
    sampler_times()
    attention_times()
    pointwise_times()
    print(f"\n{time.monotonic() - BEGIN:.0f} s in all")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
