"""What skinny_gemm gives a decode step of Qwen2-0.5B, for scripts/gpu_gemm.py: cuBLAS, as measured, everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from decode_cases import DEVICE, RUN, TINY, error, gpu_us
from decode_models import build, kernels

from voxfuse.fusions.decode_step import empty_cache, step
from voxfuse.kernels import skinny_gemm

HELD = 4 if TINY else 64  # tokens in the cache
STEPS = 3  # of one graph


class Everywhere(dict[tuple[str, str, int, int], int]):
    """A table for which skinny_gemm is the fastest always."""

    def get(self, key: Any, default: Any = None) -> Any:
        return skinny_gemm.MAX_ROWS


def decode_steps(measured: dict[tuple[str, str, int, int], int], late: Callable[[], bool]) -> None:
    """ms and kernels of a captured step with its head, and how far its logits are from cuBLAS' own."""
    print("\ndecode step of Qwen2-0.5B's sizes in a graph: ms a token, kernels, distance of the logits")
    tables = {"cuBLAS": {}, "as measured": measured, "skinny everywhere": Everywhere()}
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
            for arm, table in tables.items():
                if late():
                    print("not reached")
                    return
                skinny_gemm.MOST_ROWS = table
                try:
                    logits[arm] = call().double()
                    count = 0 if TINY else kernels(call)
                    far = error(logits[arm], logits["cuBLAS"])
                    text = f"{gpu_us(call, STEPS) / 1e3:7.3f} ms, {count:4} kernels, {far:.1e}"
                except Exception as fault:  # the other arms have figures all the same
                    text = f"{type(fault).__name__}: {str(fault).splitlines()[:1]}"
                print(f"  {str(dtype)[6:]:8} {rows:2} rows {arm:18} {text}", flush=True)
    skinny_gemm.MOST_ROWS = {}


def _call(model: Any, x: torch.Tensor, cache: Any, lengths: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: step(model.model, x, cache, lengths, RUN, model.lm_head)
