"""The decode kernels on one GPU in under 100 s: fidelity against fp64 over the real shapes, GPU time against eager,
SDPA, torch.compile and Liger, and one decode step of a Qwen2-0.5B with random weights, untouched and patched.

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
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import voxfuse
from voxfuse.kernels._op import TALLIES, FusedOp, Run
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope import qk_norm_rope
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.rmsnorm import add_rms_norm, rms_norm
from voxfuse.kernels.swiglu import swiglu

BEGIN = time.monotonic()
COMPILE_UNTIL_S, TIMES_UNTIL_S = 70.0, 90.0  # seconds from the start at which no further such part begins
DEVICE = torch.device("cpu" if TINY else "cuda")
RUN = Run("interpreter" if TINY else "triton", "gpu_decode")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = 1e-6
CALLS, REPLAYS = 20, 15  # of one graph
# name: hidden, intermediate, query heads, kv heads, head_dim, whether heads are normed
MODELS = {
    "Qwen2-0.5B": (896, 4864, 14, 2, 64, False),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, True),
    "talker 16/2": (1024, 3072, 16, 2, 128, True),
    "Llama T3": (1024, 4096, 16, 16, 64, False),
}
HALF_AND_FULL = ("Qwen2-0.5B", "Qwen3-0.6B", "tiny")  # checked in fp16 and fp32 too
if TINY:
    MODELS = {"tiny": (48, 40, 4, 2, 16, True)}
ROWS = (1, 2) if TINY else (1, 16, 64)
CONTEXTS = (40,) if TINY else (32, 512, 2048, 8192)
NONE: tuple[Any, ...] = (None, None, EPS, "cast_then_scale")
HALF: tuple[Any, ...] = ("half", [], False, False)


def normal(*shape: int, dtype: torch.dtype, around: float = 0.0) -> torch.Tensor:
    return (around + (0.3 if around else 1.0) * torch.randn(shape, device=DEVICE)).to(dtype)


def tables(rows: int, tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    positions = 100.0 + torch.arange(tokens, device=DEVICE).expand(rows, tokens)
    angles = positions[..., None] * 10000.0 ** (-torch.arange(0, width, 2, device=DEVICE) / width)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def norm_case(model: str, rows: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    hidden = MODELS[model][0]
    return normal(rows, tokens, hidden, dtype=dtype), normal(hidden, dtype=dtype, around=1.0), EPS, "cast_then_scale"


def rope_case(model: str, rows: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    _, _, q_heads, kv_heads, head_dim, normed = MODELS[model]
    q, k = (normal(rows, tokens, count, head_dim, dtype=dtype) for count in (q_heads, kv_heads))
    weights = tuple(normal(head_dim, dtype=dtype, around=1.0) for _ in range(2))
    norm = (*weights, EPS, "cast_then_scale") if normed else NONE
    return (q, k, *tables(rows, tokens, head_dim, dtype), *norm, *HALF)


def swiglu_case(model: str, rows: int, tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(normal(rows, tokens, 2 * MODELS[model][1], dtype=dtype).chunk(2, dim=-1))


def attention_case(model: str, rows: int, context: int, dtype: torch.dtype, tokens: int = 1) -> tuple[Any, ...]:
    _, _, q_heads, kv_heads, head_dim, _ = MODELS[model]
    q = normal(rows, tokens, q_heads, head_dim, dtype=dtype).transpose(1, 2)
    k, v = (normal(rows, kv_heads, context, head_dim, dtype=dtype) for _ in range(2))
    lengths = torch.randint(max(tokens, context // 2), context + 1, (rows,), device=DEVICE)
    return q, k, v, lengths, None, head_dim**-0.5, True, 0


def double(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)


def error(value: torch.Tensor, oracle: torch.Tensor) -> float:
    return float((value.double() - oracle).norm() / oracle.norm())


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


def gpu_us(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Median µs of a call, from replays of a graph that holds ``calls`` of it (in --tiny mode one timed call)."""
    if TINY:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    samples = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples)


def host_us(call: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(1 if TINY else 3):
        count = 1 if TINY else 200
        begin = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begin) / count * 1e6)
        if not TINY:
            torch.cuda.synchronize()
    return best


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


def model_step() -> None:
    """One decode step of Qwen2-0.5B shapes over a static cache: eager and in a CUDA graph, untouched and patched."""
    try:
        from transformers import Qwen2Config, Qwen2ForCausalLM, StaticCache
    except ImportError as absent:
        print(f"\ndecode step of a model: not run, {absent}")
        return
    layers, sizes = (1, (48, 40, 4, 2)) if TINY else (24, MODELS["Qwen2-0.5B"][:4])
    config = Qwen2Config(
        hidden_size=sizes[0], intermediate_size=sizes[1], num_attention_heads=sizes[2], num_key_value_heads=sizes[3],
        num_hidden_layers=layers, vocab_size=6761, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = torch.float32 if TINY else torch.bfloat16
    model = Qwen2ForCausalLM(config).eval().to(DEVICE, dtype)
    for rows in (1,) if TINY else (1, 16):
        print(f"\ndecode step, Qwen2-0.5B shapes, {rows} rows, cache of 512: eager wall ms, graph ms, kernels, logits")
        logits: dict[str, torch.Tensor] = {}
        for arm in ("untouched", "patched"):
            torch.manual_seed(3)
            prompt = torch.randint(0, 6761, (rows, 8), device=DEVICE)
            token = torch.randint(0, 6761, (rows, 1), device=DEVICE)
            patches = voxfuse.apply_patches(model, policy="all", backend=RUN.backend) if arm == "patched" else None
            try:
                cache = StaticCache(config=config, max_cache_len=16 if TINY else 512)
                step = _stepper(model, cache, prompt, token)
                logits[arm] = step().float()
                print(f"  {arm:10} {_step_times(step)}", flush=True)
                if patches is not None:
                    for receipt in patches.receipts:
                        if receipt.status == "applied":
                            print(f"    {receipt.fusion}: {receipt.calls} calls, fallbacks {receipt.fallbacks}")
            except Exception as fault:  # one arm may fail to be captured: say so and go on
                print(f"  {arm:10} {type(fault).__name__}: {str(fault).splitlines()[0]}")
            finally:
                if patches is not None:
                    patches.revert()
        if len(logits) == 2:
            print(f"  patched against untouched logits: {error(logits['patched'], logits['untouched'].double()):.2e}")


def _stepper(model: Any, cache: Any, prompt: torch.Tensor, token: torch.Tensor) -> Callable[[], torch.Tensor]:
    cached = {"past_key_values": cache, "use_cache": True}
    model(prompt, **cached)
    position = torch.full((1, 1), prompt.shape[1], device=DEVICE)

    def step() -> torch.Tensor:
        return model(token, position_ids=position, **cached).logits

    return step


def _step_times(step: Callable[[], torch.Tensor]) -> str:
    if TINY:
        return "not timed"
    wall = host_us_synchronised(step, 10)
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == DeviceType.CUDA for event in trace.events())
    try:
        return f"{wall / 1e3:7.2f} ms, graph {gpu_us(step, 1) / 1e3:6.3f} ms, {kernels} kernels"
    except Exception as fault:  # a step that cannot be captured has its eager figures all the same
        return f"{wall / 1e3:7.2f} ms, no graph ({type(fault).__name__}: {str(fault)[:80]}), {kernels} kernels"


def host_us_synchronised(step: Callable[[], Any], count: int) -> float:
    walls = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(walls)


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
    model_step()
    attention_times()
    pointwise_times()
    print(f"\n{time.monotonic() - BEGIN:.0f} s in all")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
