"""For scripts/gpu_gemm.py: what skinny_gemm gives a whole decode step of Qwen2-0.5B, and the two small kernels of a
code predictor (small_attention, embedding_sum) against what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from decode_cases import DEVICE, EPS, RUN, TINY, error, gpu_us, normal, tables
from decode_models import build, kernels

from voxfuse.fusions.decode_step import empty_cache, step
from voxfuse.kernels import _skinny_choice, skinny_gemm
from voxfuse.kernels.embedding_sum import embedding_sum
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.small_attention import small_attention

HELD = 4 if TINY else 64  # tokens in the cache
STEPS = 3  # of one graph


Key = tuple[str | None, str, str, int, int]  # of MOST_ROWS


class Everywhere(dict[Key, int]):
    """A table for which skinny_gemm is the fastest always."""

    def get(self, key: Any, default: Any = None) -> Any:
        return skinny_gemm.MAX_ROWS


def decode_steps(measured: dict[Key, int], late: Callable[[], bool]) -> None:
    """ms and kernels of a captured step with its head, and how far its logits are from cuBLAS' own."""
    print("\ndecode step of Qwen2-0.5B's sizes in a graph: ms a token, kernels, distance of the logits")
    choices: dict[str, dict[Key, int]] = {
        "cuBLAS": {},
        "as measured": measured,
        "checked in": _skinny_choice.MOST_ROWS,
        "skinny everywhere": Everywhere(),
    }
    for dtype in (torch.float32,) if TINY else (torch.bfloat16, torch.float32):
        if late():
            print("not reached")
            return
        model = build(dtype)
        for rows in (1,) if TINY else (1, 4, 16):
            x = torch.randn(rows, 1, model.config.hidden_size, device=DEVICE).to(dtype)
            cache = empty_cache(model.model, rows, 256)
            for part in cache:
                part.normal_()
            lengths = torch.full((rows,), HELD, device=DEVICE)
            call = _call(model, x, cache, lengths)
            logits: dict[str, torch.Tensor] = {}
            for arm, table in choices.items():
                if late():
                    print("not reached")
                    return
                _skinny_choice.MOST_ROWS = table
                try:
                    logits[arm] = call().double()
                    count = 0 if TINY else kernels(call)
                    far = error(logits[arm], logits["cuBLAS"])
                    text = f"{gpu_us(call, STEPS) / 1e3:7.3f} ms, {count:4} kernels, {far:.1e}"
                except Exception as fault:  # the other arms have figures all the same
                    text = f"{type(fault).__name__}: {str(fault).splitlines()[:1]}"
                print(f"  {str(dtype)[6:]:8} {rows:2} rows {arm:18} {text}", flush=True)
    _skinny_choice.MOST_ROWS = choices["checked in"]


def _call(model: Any, x: torch.Tensor, cache: Any, lengths: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: step(model.model, x, cache, lengths, RUN, model.lm_head)


def predictor_times() -> None:
    """µs of a code predictor's attention (16/8 heads of 128, 16 keys) and of its embeddings (16 codebooks of 2048)."""
    print("\nsmall kernels of a code predictor, bf16: ours, then apart (attention: two launches; embeddings: eager)")
    dtype, head_dim, kv_heads = torch.bfloat16, 16 if TINY else 128, 2 if TINY else 8
    for rows in (1,) if TINY else (1, 4, 16):
        heads = normal(rows, 1, 4 * kv_heads, head_dim, dtype=dtype)
        q, k, v = heads.split([2 * kv_heads, kv_heads, kv_heads], dim=2)
        caches = [normal(rows, kv_heads, 16, head_dim, dtype=dtype) for _ in range(2)]
        slots = torch.full((rows, 1), 15, device=DEVICE)
        weights = [normal(head_dim, dtype=dtype, around=1.0) for _ in range(2)]
        rope = (*tables(rows, 1, head_dim, dtype), *weights, EPS, "cast_then_scale", "half", [], False, False)
        scale = head_dim**-0.5

        def apart() -> Any:
            query = qk_norm_rope_cached(q, k, v, *caches, slots, *rope, run=RUN)  # noqa: B023
            ends = slots.view(-1) + 1  # noqa: B023
            return gqa_decode(query.transpose(1, 2), *caches, ends, None, scale, False, 0, run=RUN)  # noqa: B023

        def together() -> Any:
            return small_attention(q, k, v, *caches, slots, *rope, scale, run=RUN)  # noqa: B023

        far = error(together(), apart().double())
        print(f"  attention  {rows:2} rows {gpu_us(together):8.2f} {gpu_us(apart):8.2f}  distance {far:.1e}")
        entries = 20 if TINY else 2048
        ids = torch.randint(0, entries, (rows, 16), device=DEVICE)
        table, offsets = normal(16 * entries, 1024, dtype=dtype), torch.arange(16, device=DEVICE) * entries
        for order in ("once", "each"):
            ours = gpu_us(lambda: embedding_sum(ids, table, offsets, order, run=RUN))  # noqa: B023
            eager = gpu_us(lambda: embedding_sum.reference(ids, table, offsets, order))  # noqa: B023
            print(f"  embeddings {rows:2} rows {ours:8.2f} {eager:8.2f}  summed {order}", flush=True)
