"""Sums of codebook embeddings compiled ahead of time for every GPU family."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels.embedding_sum import BLOCK, WARPS

pytestmark = pytest.mark.aot

INTEGERS = ("INNER", "N", "BLOCKS", "ENTRIES", "stride_ia", "stride_ib", "stride_ic", "stride_t")
KEYS = [(target, order, count) for target in TARGETS for order, count in (("once", 16), ("each", 33), ("mean", 64))]


def _request(target: str, order: str, count: int) -> Request:
    cuda = target.startswith("sm_")
    return Request(
        kernel="voxfuse.kernels.embedding_sum:_embedding_sum_kernel",
        signature={"ids_ptr": "*i64", "table_ptr": "*bf16", "offsets_ptr": "*i64", "y_ptr": "*bf16"}
        | dict.fromkeys(INTEGERS, "i32")
        | {"inverse_c": "fp32"},
        constants={
            "C": count,
            "ORDER": order,
            "TARGET": "cuda" if cuda else "hip",
            "BLOCK": BLOCK,
            "stride_ic": 1,
        },
        warps=WARPS,
        target=target,
        options={} if cuda else {"enable_fp_fusion": False},
        aligned=("table_ptr", "y_ptr", "N", "stride_t"),
        patterns=(r"add\.rn\.f32",),
    )


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(KEYS, compile_ahead([_request(*key) for key in KEYS]), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_resources(key, compiled):
    found = compiled[key]
    assert found.spills == 0 and found.registers <= 255 and found.shared == 0
    if key[0].startswith("sm_"):
        assert found.counts[r"add\.rn\.f32"] >= key[2]
