"""The AdaIN kernels compiled ahead of time for every GPU family: registers, spills, shared memory, wide loads."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels._tuned import lookup
from voxfuse.kernels.adain import OPERATION, RESIDENT_FRAMES, STREAM_FRAMES, shape_class

pytestmark = pytest.mark.aot

POINTERS = ("x_ptr", "y_ptr", "style_ptr", "weight_ptr", "bias_ptr", "alpha_ptr")
SIGNATURE = dict.fromkeys(POINTERS, "*fp32") | dict.fromkeys(
    ("C", "T", "stride_xb", "stride_xc", "stride_xt", "stride_style"), "i32"
) | {"lengths_ptr": "*i64", "eps": "fp32", "slope": "fp32"}  # fmt: skip
CONFIGURATIONS = {
    "resident": ("_resident_kernel", RESIDENT_FRAMES, RESIDENT_FRAMES, 168),
    "streaming": ("_streaming_kernel", STREAM_FRAMES, RESIDENT_FRAMES + 1, 64),
}  # kernel, block, frames of its class, most registers


def _options(frames: int, target: str) -> dict[str, int]:
    capability = f"{target[3:-1]}.{target[-1]}" if target.startswith("sm_") else target
    return dict(lookup(OPERATION, shape_class(frames), capability))


def _request(name: str, target: str, snake: bool) -> Request:
    kernel, block, frames, _ = CONFIGURATIONS[name]
    options = _options(frames, target)
    warps = options.pop("num_warps")
    constants: dict[str, int | None] = {"BLOCK_T": block, "stride_xt": 1}
    if not snake:
        constants["alpha_ptr"] = None
    return Request(
        kernel=f"voxfuse.kernels.adain:{kernel}",
        signature=SIGNATURE,
        constants=constants,
        warps=warps,
        target=target,
        options=options,
        patterns=(r"\bsin", r"fma\.rn\.f32|v_(?:pk_)?fma"),
    )


@pytest.fixture(scope="module")
def compiled():
    keys = [(name, target, snake) for name in CONFIGURATIONS for target in TARGETS for snake in (True, False)]
    return dict(zip(keys, compile_ahead([_request(*key) for key in keys]), strict=True))


@pytest.mark.parametrize("snake", [True, False])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resources(name, target, snake, compiled):
    found = compiled[name, target, snake]
    *_, registers = CONFIGURATIONS[name]
    assert found.spills == 0, f"{found.spills} bytes of registers spilled"
    assert found.registers <= registers
    assert 0 < found.shared <= 4096, "shared memory serves the reductions alone"
    assert found.counts[r"\bsin"] == 0, "a library sine was called: it needs a stack"
    assert found.counts[r"fma\.rn\.f32|v_(?:pk_)?fma"] > 0, "no fused multiply-add: the sine's reduction needs them"
