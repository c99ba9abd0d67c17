"""What scripts/gpu_decode.py measures with: shapes of real decoders, random inputs, GPU and host times."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from voxfuse.kernels._op import Run

TINY = "--tiny" in sys.argv[1:]
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


def host_us_synchronised(step: Callable[[], Any], count: int) -> float:
    walls = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(walls)
