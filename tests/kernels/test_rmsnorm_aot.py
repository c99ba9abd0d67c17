"""RMSNorm compiled ahead of time for every GPU family: registers, spills, no contraction."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels.rmsnorm import RESIDENT_WIDTH, STREAM_WIDTH

pytestmark = pytest.mark.aot

INTEGERS = ("INNER", "N", "stride_xa", "stride_xb", "stride_xn", "stride_ra", "stride_rb", "stride_rn")
SHAPES = {"896": (1024, True, 4), "widest resident": (RESIDENT_WIDTH, True, 16), "streaming": (STREAM_WIDTH, False, 16)}


def _request(target: str, shape: str, residual: bool, element: str) -> Request:
    block, resident, warps = SHAPES[shape]
    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "sum_ptr"), f"*{element}")
    constants = {
        "ORDER": "cast_then_scale",
        "TARGET": "cuda" if target.startswith("sm_") else "hip",
        "BLOCK": block,
        "RESIDENT": resident,
        "stride_xn": 1,
        "stride_rn": 1,
    } | ({} if residual else {"residual_ptr": None, "sum_ptr": None})
    return Request(
        kernel="voxfuse.kernels.rmsnorm:_rmsnorm_kernel",
        signature=pointers | dict.fromkeys(INTEGERS, "i32") | {"eps": "fp32", "inverse_n": "fp32"},
        constants=constants,
        warps=warps,
        target=target,
        options={} if target.startswith("sm_") else {"enable_fp_fusion": False},
        patterns=(r"mul\.rn\.f32",),
    )


KEYS = [(t, s, r, e) for t in TARGETS for s in SHAPES for r in (True, False) for e in ("bf16", "fp32")]


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(KEYS, compile_ahead([_request(*key) for key in KEYS]), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=lambda key: " ".join(map(str, key)))
def test_resources(key, compiled):
    found = compiled[key]
    assert found.spills == 0 and found.registers <= 128
    assert found.shared <= 1024, "shared memory serves the reduction alone"
    if key[0].startswith("sm_"):
        assert found.counts[r"mul\.rn\.f32"] > 0, "a product may be contracted"
