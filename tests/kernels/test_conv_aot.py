"""The channels-last kernels compiled ahead of time for every GPU family: registers, spills, shared memory."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels.moments import BLOCK_CHANNELS, BLOCK_FRAMES, MAX_CHUNKS, OPTIONS
from voxfuse.kernels.snake import BLOCK_ELEMENTS, MAX_BLOCK_CHANNELS

pytestmark = pytest.mark.aot

WARPS = dict(OPTIONS)["num_warps"]
BLOCK = {"BLOCK_T": BLOCK_FRAMES, "BLOCK_C": BLOCK_CHANNELS}
MOMENTS = dict.fromkeys(("x_ptr", "y_ptr", "moments_ptr", "bias_ptr", "residual_ptr"), "*fp32") | dict.fromkeys(
    (
        *("C", "T", "CHUNK_T", "chunks", "per_phase"),
        *(f"stride_{name}" for name in ("xb", "xt", "xc", "rb", "rt", "rc")),
    ),
    "i32",
) | {"lengths_ptr": "*i64"}  # fmt: skip
ADAIN = dict.fromkeys(
    ("x_ptr", "y_ptr", "moments_ptr", "style_ptr", "weight_ptr", "bias_ptr", "alpha_ptr"), "*fp32"
) | dict.fromkeys(
    (
        *("C", "T", "held", "front", "CHUNK_T", "chunks", "x_per_phase", "y_per_phase"),
        *("stride_xb", "stride_xt", "stride_style"),
    ),
    "i32",
) | {"lengths_ptr": "*i64", "eps": "fp32", "slope": "fp32"}  # fmt: skip
SNAKE = dict.fromkeys(
    ("x_ptr", "raw_ptr", "y_ptr", "bias_ptr", "residual_ptr", "alpha_ptr"), "*fp32"
) | dict.fromkeys(
    (
        *("C", "T", "held", "front", "x_per_phase", "y_per_phase"),
        *(f"stride_{name}" for name in ("xb", "xt", "xc", "rb", "rt", "rc")),
    ),
    "i32",
) | {"lengths_ptr": "*i64"}  # fmt: skip
SNAKE_BLOCK = {
    "stride_xc": 1,
    "stride_rc": 1,
    "BLOCK_C": MAX_BLOCK_CHANNELS,
    "BLOCK_T": BLOCK_ELEMENTS // MAX_BLOCK_CHANNELS,
}
PLAIN = {"X_PHASES": 1, "Y_PHASES": 1}
CONFIGURATIONS = {  # kernel, signature, constants
    "read only": (
        "moments:_moments_kernel",
        MOMENTS,
        {"y_ptr": None, "bias_ptr": None, "residual_ptr": None, "stride_xc": 1, "PHASES": 5},
    ),
    "residual": ("moments:_moments_kernel", MOMENTS, {"stride_xc": 1, "stride_rc": 1, "PHASES": 3}),
    "channels first": (
        "moments:_moments_kernel",
        MOMENTS,
        {"bias_ptr": None, "residual_ptr": None, "stride_xt": 1, "PHASES": 1, "BLOCK_T": BLOCK_FRAMES // 2},
    ),
    "snake": ("adain_channels_last:_adain_kernel", ADAIN, PLAIN | {"MAX_CHUNKS": MAX_CHUNKS, "Y_PHASES": 5}),
    "leaky relu": ("adain_channels_last:_adain_kernel", ADAIN, PLAIN | {"MAX_CHUNKS": MAX_CHUNKS, "alpha_ptr": None}),
    "snake between convolutions": (
        "snake:_snake_kernel",
        SNAKE,
        SNAKE_BLOCK | {"raw_ptr": None, "residual_ptr": None, "X_PHASES": 5, "Y_PHASES": 1},
    ),
    "sum and snake": ("snake:_snake_kernel", SNAKE, SNAKE_BLOCK | {"X_PHASES": 1, "Y_PHASES": 3}),
    "sum of channels first": (
        "snake:_snake_kernel",
        SNAKE,
        SNAKE_BLOCK
        | PLAIN
        | {"y_ptr": None, "alpha_ptr": None, "residual_ptr": None, "stride_xt": 1, "stride_xc": 480},
    ),
}


def _request(name: str, target: str) -> Request:
    kernel, signature, constants = CONFIGURATIONS[name]
    return Request(
        kernel=f"voxfuse.kernels.{kernel}",
        signature=signature,
        constants=BLOCK | constants,
        warps=WARPS,
        target=target,
        patterns=(r"\bsin",),
    )


@pytest.fixture(scope="module")
def compiled():
    keys = [(name, target) for name in CONFIGURATIONS for target in TARGETS]
    return dict(zip(keys, compile_ahead([_request(*key) for key in keys]), strict=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resources(name, target, compiled):
    found = compiled[name, target]
    assert found.spills == 0, f"{found.spills} bytes of registers spilled"
    assert 2 * found.registers * WARPS * 32 <= 65_536, f"{found.registers}: fewer than two programs a multiprocessor"
    assert found.shared <= 4 * BLOCK_FRAMES * (BLOCK_CHANNELS + 8), "more than a tile that is transposed"
    assert found.counts[r"\bsin"] == 0, "a library sine was called: it needs a stack"
