"""The sampling kernels compiled ahead of time for every GPU family, at speech vocabularies."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels.sampler import warps_of

pytestmark = pytest.mark.aot

BLOCKS = {"code book": 2048, "CosyVoice": 8192, "largest": 16384}
KEYS = [(target, kernel, block) for target in TARGETS for kernel in ("sample", "ras") for block in BLOCKS]


def _request(target: str, kernel: str, size: str) -> Request:
    block = BLOCKS[size]
    if kernel == "sample":
        return Request(
            kernel="voxfuse.kernels.sampler:_sampler_kernel",
            signature={"logits_ptr": "*fp32", "seen_ptr": "*u8", "noise_ptr": "*fp32", "token_ptr": "*i64"}
            | dict.fromkeys(("N", "K", "stride_lr"), "i32")
            | dict.fromkeys(("temperature", "below", "penalty"), "fp32"),
            constants={"TOP_K": True, "TOP_P": True, "BLOCK": block},
            warps=warps_of(block),
            target=target,
        )
    return Request(
        kernel="voxfuse.kernels.ras_sampler:_ras_sampler_kernel",
        signature={
            "scores_ptr": "*fp32",
            "recent_ptr": "*i64",
            "nucleus_ptr": "*fp32",
            "whole_ptr": "*fp32",
            "result_ptr": "*i64",
        }
        | dict.fromkeys(("N", "K", "WINDOW", "stride_sr"), "i32")
        | dict.fromkeys(("top_p", "repeats"), "fp32"),
        constants={"EXCLUDE": True, "BLOCK": block, "BLOCK_W": 16},
        warps=warps_of(block),
        target=target,
    )


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(KEYS, compile_ahead([_request(*key) for key in KEYS]), strict=True))


@pytest.mark.parametrize("key", KEYS, ids=" ".join)
def test_resources(key, compiled):
    found = compiled[key]
    most = 256 if key[2] == "largest" else 0  # bytes: three rows of 32 elements a thread do not quite fit
    assert found.spills <= most, f"{found.spills} bytes of registers spilled"
    assert found.registers <= 255 and found.shared <= 64 * 1024
