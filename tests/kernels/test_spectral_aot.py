"""The short-time transforms and the source compiled ahead of time: registers, spills, and what must not be called."""

import pytest
from aot import TARGETS, Request, compile_ahead

from voxfuse.kernels import held_source, istft, sine_source, stft
from voxfuse.kernels._dft import twiddles

pytestmark = pytest.mark.aot

COS, SIN = twiddles(20)
CALLS = r"\bsin\b|\bex2\.approx|__nv_|__ocml"  # library or approximate functions
FP64_CONSTANT = r"0d3FE2CF2304755A5E"  # cos(54 degrees) to the last bit of fp64


def pointers(*names):
    return dict.fromkeys(names, "*fp32") | {"lengths_ptr": "*i64"}


STFT = pointers("x_ptr", "window_ptr", "y_ptr") | dict.fromkeys(
    ("samples", "frames", "lead", "held", "channels", "stride_xr", "stride_xt"), "i32"
)
STFT_BLOCK = {
    **{"N_FFT": 20, "HOP": 5, "COS": COS, "SIN": SIN, "WIDTH": 32},
    **{"BLOCK_F": stft.BLOCK_FRAMES, "stride_xt": 1},
}
KERNELS = {
    "stft": ("voxfuse.kernels.stft:_stft_kernel", STFT, STFT_BLOCK | {"POLAR": True}),
    "stft of parts": ("voxfuse.kernels.stft:_stft_kernel", STFT, STFT_BLOCK | {"POLAR": False}),
    "istft": (
        "voxfuse.kernels.istft:_istft_kernel",
        pointers("a_ptr", "b_ptr", "window_ptr", "y_ptr")
        | dict.fromkeys(("frames", *(f"stride_{t}{axis}" for t in "ab" for axis in "rkf")), "i32")
        | dict.fromkeys(("max_magnitude", "max_sample"), "fp32"),
        {"N_FFT": 20, "HOP": 5, "COS": COS, "SIN": SIN, "EXP_SIN": True, "BLOCK_H": istft.BLOCK_HOPS, "stride_af": 1,
         "stride_bf": 1},
    ),
    "sine_source": (
        "voxfuse.kernels.sine_source:_sine_source_kernel",
        pointers("f0_ptr", "noise_ptr", "weight_ptr", "bias_ptr", "y_ptr")
        | dict.fromkeys(("frames", "stride_f0r", "stride_f0t", "stride_nr", "stride_nt", "stride_nk"), "i32")
        | dict.fromkeys(("sampling_rate", "amplitude", "noise_std", "unvoiced_noise", "threshold"), "fp32"),
        {"initial_ptr": None, "SCALE": 300, "HELD": False, "HARMONICS": 9, "BLOCK_T": sine_source.BLOCK_SAMPLES,
         "BLOCK_F": sine_source.BLOCK_FRAMES, "stride_nt": 1},
    ),
    "stepped_source": (
        "voxfuse.kernels.sine_source:_sine_source_kernel",
        pointers("f0_ptr", "noise_ptr", "weight_ptr", "bias_ptr", "y_ptr", "initial_ptr")
        | dict.fromkeys(("frames", "stride_f0r", "stride_f0t", "stride_nr", "stride_nt", "stride_nk"), "i32")
        | dict.fromkeys(("sampling_rate", "amplitude", "noise_std", "unvoiced_noise", "threshold"), "fp32"),
        {"SCALE": 480, "HELD": True, "HARMONICS": 9, "BLOCK_T": sine_source.BLOCK_SAMPLES,
         "BLOCK_F": sine_source.BLOCK_FRAMES, "stride_f0t": 1, "stride_nt": 1},
    ),
    "held_source": (
        "voxfuse.kernels.held_source:_held_source_kernel",
        pointers("sines_ptr", "f0_ptr", "noise_ptr", "weight_ptr", "bias_ptr", "y_ptr")
        | dict.fromkeys(("frames", *(f"stride_{t}{axis}" for t in ("s", "n") for axis in "rtk"), "stride_f0r",
                         "stride_f0t"), "i32")
        | dict.fromkeys(("amplitude", "noise_std", "unvoiced_noise", "threshold"), "fp32"),
        {"SCALE": 480, "HELD": True, "HARMONICS": 9, "BLOCK_T": held_source.BLOCK_SAMPLES, "stride_st": 1,
         "stride_f0t": 1, "stride_nk": 1},
    ),
}  # fmt: skip
SOURCES = ("sine_source", "stepped_source", "held_source")
REGISTERS = {
    "stft": 144,
    "stft of parts": 168,
    "istft": 168,
    "sine_source": 128,
    "stepped_source": 128,
    "held_source": 128,
}


@pytest.fixture(scope="module")
def compiled():
    keys = [(name, target) for name in KERNELS for target in TARGETS]
    requests = [
        Request(kernel, signature, constants, 4, target, (CALLS, FP64_CONSTANT))
        for (kernel, signature, constants), target in ((KERNELS[name], target) for name, target in keys)
    ]
    return dict(zip(keys, compile_ahead(requests), strict=True))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_resources(name, target, compiled):
    found = compiled[name, target]
    assert found.spills == 0, f"{found.spills} bytes of registers spilled"
    assert found.registers <= (256 if target.startswith("gfx") else REGISTERS[name])
    assert found.counts[CALLS] == 0, "a library or approximate function was called"
    if target.startswith("sm_") and name not in SOURCES:
        assert found.counts[FP64_CONSTANT] > 0, "twiddle factors are not fp64 constants"
