"""A code predictor's attention compiled ahead of time for every GPU family: registers, spills, no contraction."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels.small_attention import launch_options

pytestmark = pytest.mark.aot

POINTERS = ("q_ptr", "k_ptr", "v_ptr", "y_ptr", "k_cache_ptr", "v_cache_ptr", "cos_ptr", "sin_ptr")
NORMS = ("q_weight_ptr", "k_weight_ptr")
INTEGERS = (
    "HQ", "GROUP", "CACHE",
    "stride_qb", "stride_qh", "stride_qd", "stride_kb", "stride_kh", "stride_kd", "stride_vb", "stride_vh", "stride_vd",
    "stride_axis", "stride_cb", "stride_cw",
    "stride_kcb", "stride_kch", "stride_kcl", "stride_vcb", "stride_vch", "stride_vcl", "stride_sb",
)  # fmt: skip
VARIANTS = {  # element, head_dim, keys, norm, sections, group
    "qwen3 predictor": ("bf16", 128, 16, True, "none", 2),
    "32 keys, fp32": ("fp32", 128, 32, True, "none", 2),
    "no norm, 64": ("fp16", 64, 16, False, "none", 8),
    "sections, one head": ("bf16", 128, 32, True, "alternating", 1),
    "head_dim 256": ("bf16", 256, 32, True, "runs", 2),
}


def _request(target: str, variant: str) -> Request:
    element, head_dim, keys, norm, sections, group = VARIANTS[variant]
    options = dict(launch_options(keys * head_dim))
    names = (*POINTERS, *(NORMS if norm else ()))
    return Request(
        kernel="voxfuse.kernels.small_attention:_small_attention_kernel",
        signature=dict.fromkeys(names, f"*{element}")
        | {"slots_ptr": "*i64"}
        | dict.fromkeys(INTEGERS, "i32")
        | dict.fromkeys(("eps", "inverse_d", "scale"), "fp32"),
        constants={
            "S0": 24, "S1": 20, "S2": 20, "D": head_dim, "R": head_dim, "ORDER": "cast_then_scale", "PAIRS": "half",
            "SECTIONS": sections, "WIDE": False, "TARGET": "cuda" if target.startswith("sm_") else "hip",
            "BLOCK_L": keys, "BLOCK_D": head_dim, "stride_qd": 1, "stride_kd": 1, "stride_vd": 1, "stride_cw": 1,
            **dict.fromkeys(() if norm else NORMS), **({"GROUP": 1} if group == 1 else {}),
        },
        warps=options["num_warps"],
        target=target,
        options={} if target.startswith("sm_") else {"enable_fp_fusion": False},
        patterns=(r"mul\.rn\.f32",),
    )  # fmt: skip


KEYS = [(target, variant) for target in TARGETS for variant in VARIANTS]


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(KEYS, compile_ahead([_request(*key) for key in KEYS]), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_resources(key, compiled):
    found = compiled[key]
    most = 128 if key[0] == "gfx942" else 8  # bytes: scalar registers of the many strides, and one address
    assert found.spills <= most and found.registers <= 255 and found.shared <= 48 * 1024
    if key[0].startswith("sm_"):
        assert found.counts[r"mul\.rn\.f32"] > 0, "a product may be contracted"
