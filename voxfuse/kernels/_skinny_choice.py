"""Where ``skinny_gemm`` was measured to be faster than cuBLAS: a table by GPU, operation, type and shape."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from voxfuse.kernels._tuned import capability_of

LINEAR = "skinny_linear"  # operations of this table and of ``tuned.json``
GATED = "skinny_swiglu"
# Up to how many rows the kernel with its neighbours was faster than cuBLAS with theirs, weights cold: by (compute
# capability, operation, type, N, K), as scripts/gpu_gemm.py prints them. 9.0 is one H200 with torch 2.11. What is not
# here runs cuBLAS: other GPUs, and all of fp32, where cuBLAS takes half of the time at one row.
MOST_ROWS: dict[tuple[str | None, str, str, int, int], int] = {
    ("9.0", LINEAR, "half", 896, 896): 16,
    ("9.0", LINEAR, "half", 896, 4864): 16,
    ("9.0", LINEAR, "half", 1024, 2048): 16,
    ("9.0", LINEAR, "half", 1024, 3072): 16,
    ("9.0", LINEAR, "half", 1152, 896): 8,
    ("9.0", LINEAR, "half", 2048, 2048): 4,
    ("9.0", LINEAR, "half", 2048, 6144): 16,
    ("9.0", LINEAR, "half", 4096, 1024): 4,
    ("9.0", LINEAR, "half", 4096, 2048): 1,
    ("9.0", LINEAR, "half", 6761, 896): 16,
    ("9.0", GATED, "half", 3072, 1024): 4,
    # Alone 1.05 times as fast at one row (with the options of 9.0); a whole step saves 3.8 % at four without them.
    ("9.0", GATED, "half", 4864, 896): 4,
    ("9.0", GATED, "half", 6144, 2048): 1,
}

_capability_of = functools.cache(capability_of)


def type_class(dtype: torch.dtype) -> Literal["fp32", "half"]:
    """What a type costs: fp16 and bf16 alike."""
    return "fp32" if dtype == torch.float32 else "half"


def fastest(rows: int, weight: torch.Tensor, operation: str = LINEAR) -> Literal["skinny", "cublas"]:
    """What to run a projection of so many rows with, as measured."""
    key = _capability_of(weight.device), operation, type_class(weight.dtype), *weight.shape
    return "skinny" if rows <= MOST_ROWS.get(key, 0) else "cublas"
