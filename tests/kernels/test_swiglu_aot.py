"""SwiGLU compiled ahead of time for every GPU family."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels.swiglu import BLOCK, WARPS

pytestmark = pytest.mark.aot

INTEGERS = (
    "INNER", "N", "BLOCKS", "stride_ga", "stride_gb", "stride_gn", "stride_ua", "stride_ub", "stride_un",
)  # fmt: skip
KEYS = [(target, element) for target in TARGETS for element in ("fp32", "bf16")]


def _request(target: str, element: str) -> Request:
    cuda = target.startswith("sm_")
    return Request(
        kernel="voxfuse.kernels.swiglu:_swiglu_kernel",
        signature=dict.fromkeys(("gate_ptr", "up_ptr", "y_ptr"), f"*{element}") | dict.fromkeys(INTEGERS, "i32"),
        constants={"TARGET": "cuda" if cuda else "hip", "BLOCK": BLOCK, "stride_gn": 1, "stride_un": 1},
        warps=WARPS,
        target=target,
        options={} if cuda else {"enable_fp_fusion": False},
        patterns=(r"div\.rn\.f32",),
    )


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(KEYS, compile_ahead([_request(*key) for key in KEYS]), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_resources(key, compiled):
    found = compiled[key]
    assert found.spills == 0 and found.registers <= 96 and found.shared == 0
    if key[0].startswith("sm_"):
        assert found.counts[r"div\.rn\.f32"] > 0
