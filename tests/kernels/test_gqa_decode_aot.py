"""Decode attention compiled ahead of time for every GPU family: registers, spills, shared memory."""

from dataclasses import replace

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels.gqa_decode import blocks

pytestmark = pytest.mark.aot

INTEGERS = (
    "T", "HK", "G", "L", "SPLITS", "STATISTICS",
    "stride_qb", "stride_qh", "stride_qt", "stride_kb", "stride_kh", "stride_kl", "stride_vb", "stride_vh", "stride_vl",
    "stride_mb", "stride_mh", "stride_mt", "stride_ml",
)  # fmt: skip
ALIGNED = ("q_ptr", "k_ptr", "v_ptr", "y_ptr", "sums_ptr", *(name for name in INTEGERS if name.startswith("stride_")))
VARIANTS = {  # element, head_dim, BLOCK_M, causal, window, mask, splits
    "qwen2": ("bf16", 64, 16, False, 0, None, True),
    "qwen2 fp32": ("fp32", 64, 16, False, 0, None, True),
    "qwen3": ("bf16", 128, 16, False, 0, None, True),
    "qwen3 fp32, one split, mask": ("fp32", 128, 16, False, 0, "bf16", False),
    "64 queries, window, boolean mask": ("fp16", 128, 64, True, 72, "u8", True),
    "head_dim 256": ("bf16", 256, 16, True, 0, None, True),
}


def _request(target: str, variant: str) -> Request:
    element, head_dim, block_m, causal, window, mask, split = VARIANTS[variant]
    block_n, options = blocks(block_m, head_dim, element == "fp32")
    signature = (
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "y_ptr"), f"*{element}")
        | {"lengths_ptr": "*i32", "scale": "fp32"}
        | dict.fromkeys(INTEGERS, "i32")
        | ({"mask_ptr": f"*{mask}"} if mask else {})
        | ({"sums_ptr": "*fp32"} if split else {})
    )
    constants = {
        "D": head_dim, "WINDOW": window, "CAUSAL": causal, "BOOLEAN": mask == "u8", "ALONE": not split,
        "TARGET": "cuda" if target.startswith("sm_") else "hip",
        "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": head_dim,
    } | ({} if mask else {"mask_ptr": None}) | ({} if split else {"sums_ptr": None})  # fmt: skip
    return Request(
        kernel="voxfuse.kernels.gqa_decode:_split_kernel",
        signature=signature,
        constants=constants,
        warps=dict(options)["num_warps"],
        target=target,
        options={"num_stages": dict(options)["num_stages"]},
        aligned=tuple(name for name in ALIGNED if constants.get(name, 0) is not None),
    )


def _merge(target: str) -> Request:
    return Request(
        kernel="voxfuse.kernels.gqa_decode:_merge_kernel",
        signature={"sums_ptr": "*fp32", "y_ptr": "*bf16", "SPLITS": "i32", "STATISTICS": "i32"},
        constants={
            "D": 128,
            "TARGET": "cuda" if target.startswith("sm_") else "hip",
            "BLOCK_S": 64,
            "BLOCK_D": 128,
        },
        warps=4,
        target=target,
        aligned=("sums_ptr", "y_ptr", "STATISTICS"),
    )


def _ones(target: str) -> Request:
    """Sizes of one are constants to Triton: one token, head, group, key and split, and no lengths."""
    made = _request(target, "qwen3 fp32, one split, mask")
    ones = dict.fromkeys(("T", "HK", "G", "L", "SPLITS"), 1) | {"lengths_ptr": None}
    return replace(made, constants=made.constants | ones)


KEYS = [(target, variant) for target in TARGETS for variant in (*VARIANTS, "merge", "ones")]


@pytest.fixture(scope="module")
def compiled():
    special = {"merge": _merge, "ones": _ones}
    requests = [special[name](target) if name in special else _request(target, name) for target, name in KEYS]
    return dict(zip(KEYS, compile_ahead(requests), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_resources(key, compiled):
    found = compiled[key]
    assert found.spills == 0, f"{found.spills} bytes of registers spilled"
    assert found.registers <= 255 and found.shared <= 160 * 1024
