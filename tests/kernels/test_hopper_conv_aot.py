"""The convolutions in Gluon compiled ahead of time for Hopper, which alone has their instructions."""

import pytest
from aot import Request, compile_ahead

from voxfuse.kernels._hopper_conv import (
    MULTIPROCESSOR_BYTES,
    PROGRAM_BYTES,
    configuration,
    halo_frames,
)

pytestmark = pytest.mark.aot

PAIR_POINTERS = ("x_ptr", "y_ptr", "weight_ptr", "alpha1_ptr", "bias1_ptr", "alpha2_ptr", "bias2_ptr")
PAIR_INTEGERS = ("T", "blocks", "stride_xb", "stride_xt", "dilation", "before1", "before2")
CONV_POINTERS = ("x_ptr", "raw_ptr", "y_ptr", "weight_ptr", "alpha_in_ptr", "bias_ptr", "residual_ptr", "alpha_out_ptr")
CONV_INTEGERS = ("T", "blocks", "stride_xb", "stride_xt", "stride_rb", "stride_rt", "dilation", "before")
STRIDES = {"stride_xb", "stride_xt", "stride_rb", "stride_rt"}
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FIRST = {"raw_ptr": None, "alpha_in_ptr": None, "residual_ptr": None}  # what a block's first convolution leaves out
SECOND = {"alpha_in_ptr": None}
SPILLS = 256  # bytes a thread, all around an epilogue, once a program: none between the products
CONFIGURATIONS = {  # channels, taps, dilation, type, pointers left out (None: a pair)
    "pair 64, 3 taps": (64, 3, 1, "fp32", None),
    "pair 64, 11 taps, dilation 5": (64, 11, 5, "fp32", None),
    "pair 128, 3 taps": (128, 3, 1, "fp32", None),
    "pair 128, 11 taps, dilation 5": (128, 11, 5, "fp32", None),
    "pair 64, bf16": (64, 7, 3, "bf16", None),
    "pair 128, fp16": (128, 7, 3, "fp16", None),
    "first of 64": (64, 7, 5, "fp32", FIRST),
    "second of 64": (64, 11, 1, "fp32", SECOND),
    "second of 128": (128, 11, 1, "fp32", SECOND),
    "second of 256": (256, 11, 5, "fp32", SECOND),
    "first of 256, bf16": (256, 3, 1, "bf16", FIRST),
}


def _request(name: str) -> tuple[Request, int]:
    channels, taps, dilation, kind, missing = CONFIGURATIONS[name]
    n, halo = min(channels, 128), halo_frames(dilation * (taps - 1))
    m, stages, options = configuration(channels, n, ELEMENT_BYTES[kind], halo)
    sizes = {"TAPS": taps, "HALO": halo, "M": m, "STAGES": stages}
    if missing is None:
        kernel, pointers, integers = "snake_conv_pair:_pair_kernel", PAIR_POINTERS, PAIR_INTEGERS
        constants = {"C": channels} | sizes
    else:
        kernel, pointers, integers = "conv1d_snake:_conv_kernel", CONV_POINTERS, CONV_INTEGERS
        constants = {"IN": channels, "OUT": channels, "N": n} | sizes | missing
    signature = dict.fromkeys(pointers, f"*{kind}") | dict.fromkeys(integers, "i32") | {"lengths_ptr": "*i64"}
    launched = dict(options)
    request = Request(
        kernel=f"voxfuse.kernels.{kernel}",
        signature=signature,
        constants=constants,
        warps=launched.pop("num_warps"),
        target="sm_90",
        patterns=("wgmma.mma_async", "cp.async.cg", "cp.async.ca", r"\bsin"),
        options=launched,
        aligned=tuple(
            part for part in (*pointers, *integers) if (part in pointers or part in STRIDES) and part not in constants
        ),
    )
    return request, halo


@pytest.fixture(scope="module")
def compiled():
    return dict(zip(CONFIGURATIONS, compile_ahead([_request(name)[0] for name in CONFIGURATIONS]), strict=True))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resources(name, compiled):
    channels, _, _, kind, _ = CONFIGURATIONS[name]
    found, programs = compiled[name], 2 if channels * ELEMENT_BYTES[kind] <= 256 else 1
    assert found.spills <= SPILLS, f"{found.spills} bytes of registers spilled"
    assert programs * found.registers * 8 * 32 <= 65_536, f"{found.registers}: fewer than {programs} a multiprocessor"
    assert programs * (found.shared + PROGRAM_BYTES) <= MULTIPROCESSOR_BYTES, f"{found.shared} bytes of shared memory"
    assert found.counts["wgmma.mma_async"] > 0, "no warpgroup product: another path of the tensor cores"
    assert found.counts["cp.async.cg"] > 0 and found.counts["cp.async.ca"] == 0, "weights are copied in small pieces"
    assert found.counts[r"\bsin"] == 0, "a library sine was called: it needs a stack"
