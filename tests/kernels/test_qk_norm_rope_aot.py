"""Norm and rope of the heads compiled ahead of time for every GPU family: registers, spills, no contraction."""

import pytest
from aot import TARGETS, Request, compile_ahead

pytestmark = pytest.mark.aot

POINTERS = ("q_ptr", "k_ptr", "y_ptr", "cos_ptr", "sin_ptr")
CACHE_POINTERS = ("v_ptr", "k_cache_ptr", "v_cache_ptr")
INTEGERS = (
    "T", "HQ", "HK", "QB", "BLOCKS", "CACHE",
    "stride_qb", "stride_qt", "stride_qh", "stride_qd", "stride_kb", "stride_kt", "stride_kh", "stride_kd",
    "stride_vb", "stride_vt", "stride_vh", "stride_vd", "stride_yt",
    "stride_axis", "stride_cb", "stride_ct", "stride_cw",
    "stride_kcb", "stride_kch", "stride_kcl", "stride_vcb", "stride_vch", "stride_vcl", "stride_sb", "stride_st",
)  # fmt: skip
VARIANTS = {  # head_dim, width, pairs, sections, heads a program, norm, cache
    "qwen2": (64, 64, "half", "none", 1, False, False),
    "qwen3 prefill": (128, 128, "half", "none", 4, True, False),
    "qwen3 cached": (128, 128, "half", "none", 1, True, True),
    "talker": (128, 128, "half", "alternating", 1, True, False),
    "glm": (160, 64, "interleaved", "none", 4, False, False),
}


ONES = {"qwen3 cached": dict.fromkeys(("T", "HK"), 1)}  # sizes of one are constants to Triton


def _request(target: str, variant: str) -> Request:
    head_dim, width, pairs, sections, block_h, norm, cache = VARIANTS[variant]
    names = (*POINTERS, *(CACHE_POINTERS if cache else ()), *(("q_weight_ptr", "k_weight_ptr") if norm else ()))
    absent = [name for name in (*CACHE_POINTERS, "slots_ptr") if not cache]
    absent += [name for name in ("q_weight_ptr", "k_weight_ptr") if not norm]
    signature = (
        dict.fromkeys(names, "*bf16")
        | dict.fromkeys(INTEGERS, "i32")
        | {"eps": "fp32", "inverse_d": "fp32"}
        | ({"slots_ptr": "*i64"} if cache else {})
    )
    constants = {
        "S0": 24, "S1": 20, "S2": 20, "D": head_dim, "R": width, "ORDER": "cast_then_scale", "PAIRS": pairs,
        "SECTIONS": sections, "WIDE": False, "TARGET": "cuda" if target.startswith("sm_") else "hip",
        "BLOCK_H": block_h, "BLOCK_D": 256 if head_dim > 128 else 128 if head_dim > 64 else 64,
        "stride_qd": 1, "stride_kd": 1, "stride_vd": 1, "stride_cw": 1, **dict.fromkeys(absent),
        **ONES.get(variant, {}),
    }  # fmt: skip
    return Request(
        kernel="voxfuse.kernels.qk_norm_rope:_qk_norm_rope_kernel",
        signature=signature,
        constants=constants,
        warps=1,
        target=target,
        options={} if target.startswith("sm_") else {"enable_fp_fusion": False},
        patterns=(r"mul\.rn\.f32",),
    )


KEYS = [(target, variant) for target in TARGETS for variant in VARIANTS]


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(KEYS, compile_ahead([_request(*key) for key in KEYS]), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_resources(key, compiled):
    found = compiled[key]
    assert found.spills == 0 and found.registers <= 255
    assert found.shared == 0, "one warp reduces without shared memory"
    if key[0].startswith("sm_"):
        assert found.counts[r"mul\.rn\.f32"] > 0, "a product may be contracted"
