"""Products of a few rows compiled ahead of time for every GPU family: tensor cores, asynchronous copies, resources."""

import pytest
import torch
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels._tuned import lookup
from voxfuse.kernels.skinny_gemm import GATED, LINEAR, blocks, shape_class

pytestmark = pytest.mark.aot

INTEGERS = (
    "M", "N", "PROGRAMS", "INNER_X", "stride_xa", "stride_xb", "stride_wn", "stride_un",
    "INNER_R", "stride_ra", "stride_rb", "stride_rn",
)  # fmt: skip
POINTERS = (
    "x_ptr", "weight_ptr", "up_ptr", "y_ptr", "bias_ptr", "up_bias_ptr", "residual_ptr", "norm_ptr",
)  # fmt: skip
ALIGNED = ("N", "stride_xa", "stride_xb", "stride_wn", "stride_un", "stride_ra", "stride_rb")
VARIANTS = {  # element, rows, inputs, pointers that are None
    "qkv, 1 row": ("bf16", 1, 896, ("up_ptr", "up_bias_ptr", "residual_ptr")),
    "qkv, 16 rows": ("bf16", 16, 896, ("up_ptr", "up_bias_ptr", "residual_ptr")),
    "gate and up, 1 row": ("bf16", 1, 896, ("bias_ptr", "up_bias_ptr", "residual_ptr")),
    "gate and up, 16 rows": ("fp16", 16, 896, ("bias_ptr", "up_bias_ptr", "residual_ptr")),
    "gate and up of 2048, 16 rows": ("bf16", 16, 2048, ("residual_ptr",)),
    "down, 1 row": ("bf16", 1, 4864, ("up_ptr", "bias_ptr", "up_bias_ptr", "norm_ptr")),
    "down, 16 rows": ("bf16", 16, 4864, ("up_ptr", "bias_ptr", "up_bias_ptr", "norm_ptr")),
    "norm of 4096, 16 rows": ("bf16", 16, 4096, ("up_ptr", "up_bias_ptr")),
    "fp32 qkv, 1 row": ("fp32", 1, 896, ("up_ptr", "up_bias_ptr", "residual_ptr")),
    "fp32 gate and up, 16 rows": ("fp32", 16, 896, ("residual_ptr",)),
    "fp32 down, 16 rows": ("fp32", 16, 4864, ("up_ptr", "bias_ptr", "up_bias_ptr", "norm_ptr")),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MMA, COPY, FMA, AHEAD = r"mma\.sync", r"cp\.async\.c[ag]", r"fma\.rn\.f32", r"prefetch\.global\.L2"


def _request(target: str, variant: str) -> Request:
    element, rows, inputs, absent = VARIANTS[variant]
    operation = LINEAR if "up_ptr" in absent else GATED
    capability = {"sm_80": "8.0", "sm_90": "9.0", "sm_100": "10.0"}.get(target, target)
    table = lookup(operation, shape_class(TYPES[element], inputs), capability)
    constants, options = blocks(table, rows, TYPES[element].itemsize)
    cuda = target.startswith("sm_")
    return Request(
        kernel="voxfuse.kernels.skinny_gemm:_skinny_gemm_kernel",
        signature=dict.fromkeys(POINTERS, f"*{element}") | dict.fromkeys(INTEGERS, "i32") | {"eps": "fp32"},
        constants={
            "K": inputs, "ORDER": "cast_then_scale", "TARGET": "cuda" if cuda else "hip", "stride_rn": 1,
            **dict(zip(("SLICES", "BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES"), constants, strict=True)),
            **dict.fromkeys(absent), **({"M": 1} if rows == 1 else {}),
        },
        warps=dict(options)["num_warps"],
        target=target,
        options={name: value for name, value in options if name not in ("num_warps", "enable_fp_fusion")}
        | ({} if cuda else {"enable_fp_fusion": False}),
        patterns=(MMA, COPY, FMA, AHEAD),
        aligned=(*(name for name in POINTERS if name not in absent), *ALIGNED),
    )  # fmt: skip


KEYS = [(target, variant) for target in TARGETS for variant in VARIANTS]
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(KEYS, compile_ahead([_request(*key) for key in KEYS]), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_resources(key, compiled):
    found = compiled[key]
    most = 16 if VARIANTS[key[1]][0] == "fp32" else 0  # bytes: two products of 16 rows just fill the registers
    assert found.spills <= most, f"{found.spills} bytes of registers spilled"
    assert found.registers <= 255 and found.shared <= SHARED_BYTES[key[0]], found


@pytest.mark.parametrize("key", [key for key in KEYS if key[0] != "gfx942"], ids=" ".join)
def test_half_types_run_on_tensor_cores_and_fp32_does_not(key, compiled):
    counts = compiled[key].counts
    assert (counts[MMA] > 0) == (VARIANTS[key[1]][0] != "fp32")
    assert counts[COPY] > 0, "weights are not copied ahead"
    assert (counts[AHEAD] > 0) == ("norm_ptr" not in VARIANTS[key[1]][3])
    if VARIANTS[key[1]][0] == "fp32":
        assert counts[FMA] >= 32


def test_as_many_tensor_core_steps_at_one_row_as_at_sixteen(compiled):
    for target in ("sm_80", "sm_90", "sm_100"):
        for name in ("qkv", "gate and up", "down"):
            few, many = (compiled[target, f"{name}, {rows}"].counts[MMA] for rows in ("1 row", "16 rows"))
            assert few == many
