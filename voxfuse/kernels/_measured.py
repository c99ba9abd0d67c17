"""What was measured to be faster, by GPU and shape: ``skinny_gemm`` or cuBLAS, ``gqa_decode`` or torch's SDPA."""

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

Heads = tuple[str | None, str, int, int, int]  # compute capability, type, query heads, kv heads, head_dim
Limits = tuple[tuple[int, int, int, int], ...]  # fewest and most rows, fewest and most keys; any of them
# Where ``gqa_decode`` beats SDPA over just the keys there are, for one token without a mask: a cache that grows. Heads
# that are not here, and other GPUs, run SDPA, as the stacks do. 9.0: one H200, torch 2.11, warm caches, at 1, 16 and 64
# rows of 32, 512, 2048 and 8192 keys; what a point stands for beside itself: scripts/gqa_wins.py.
# scripts/gqa_wins.py makes lines of records of ``voxfuse bench gqa_attention``. Those of 2026-12-01 15:44 UTC (H200,
# torch 2.11, commit 08f51d9) cover 512 keys of all of these but 16/2 heads, and 2048 of the first, and agree: 1.19 and
# 1.04, 1.36 and 1.25 times as fast at one row; 1.00 (14/2) and 0.82 (16/16) at 16. fp32 was wrong there: no line.
GQA_WINS: dict[Heads, Limits] = {
    ("9.0", "half", 14, 2, 64): ((1, 1, 128, 8192),),
    ("9.0", "half", 16, 8, 128): ((1, 1, 128, 1024),),
    ("9.0", "half", 16, 2, 128): ((1, 1, 128, 1024), (1, 1, 4096, 8192), (2, 16, 128, 1024)),
    ("9.0", "half", 16, 16, 64): ((1, 1, 128, 1024),),
}
# Where it beats SDPA over all of a static cache under a mask, by its capacity: a captured step, which serves every
# length. Heads that are not here run ``gqa_decode``: nothing is measured yet. Lines as above, of ``decode_graph``.
STATIC_GQA_WINS: dict[Heads, Limits] = {}

_capability_of = functools.cache(capability_of)


def type_class(dtype: torch.dtype) -> Literal["fp32", "half"]:
    """What a type costs: fp16 and bf16 alike."""
    return "fp32" if dtype == torch.float32 else "half"


def fastest(rows: int, weight: torch.Tensor, operation: str = LINEAR) -> Literal["skinny", "cublas"]:
    """What to run a projection of so many rows with, as measured."""
    key = _capability_of(weight.device), operation, type_class(weight.dtype), *weight.shape
    return "skinny" if rows <= MOST_ROWS.get(key, 0) else "cublas"


def gqa_wins(q_heads: int, keys: torch.Tensor) -> bool:
    """Whether ``gqa_decode`` is to attend over these keys [rows, kv_heads, keys, head_dim]; without a GPU always."""
    heads = _heads(q_heads, keys)
    return heads[0] is None or _inside(GQA_WINS.get(heads, ()), keys)


def static_gqa_wins(q_heads: int, keys: torch.Tensor) -> bool:
    """The same over a static cache [rows, kv_heads, capacity, head_dim] in a captured step."""
    limits = STATIC_GQA_WINS.get(_heads(q_heads, keys))
    return limits is None or _inside(limits, keys)


def _heads(q_heads: int, keys: torch.Tensor) -> Heads:
    return _capability_of(keys.device), type_class(keys.dtype), q_heads, keys.shape[1], keys.shape[3]


def _inside(limits: Limits, keys: torch.Tensor) -> bool:
    rows, count = keys.shape[0], keys.shape[2]
    return any(fewest <= rows <= most and least <= count <= largest for fewest, most, least, largest in limits)
