"""One Snake convolution on a Hopper GPU, against fp64 and eager cuDNN."""

import pytest
import torch
from hopper_cases import TYPES, doubles, on_hopper

from voxfuse.kernels import conv1d_snake as single_file
from voxfuse.kernels._hopper_conv import packed
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.conv1d_snake import conv1d_snake

pytestmark = on_hopper
RUN = Run("triton", "conv1d_snake gpu")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (128, 128), (256, 256), (64, 128)])
@pytest.mark.parametrize(("taps", "dilation"), [(3, 1), (7, 5), (11, 5)])
def test_a_convolution_is_as_precise_as_eager(taps, dilation, inputs, outputs, dtype, same_precision):
    for frames, ragged, snake_in, add, keep in ((129, False, False, False, False), (600, True, True, True, True)):
        x = torch.randn(2, frames, inputs).to("cuda", dtype)
        weight = (torch.randn(outputs, taps, inputs) / (inputs * taps) ** 0.5).to("cuda", dtype)
        alpha_in, alpha_out, bias = (
            (0.3 * torch.randn(size)).exp().to("cuda", dtype) for size in (inputs, outputs, outputs)
        )
        residual = torch.randn(2, frames, outputs).to("cuda", dtype) if add else None
        lengths = torch.tensor([frames, frames // 3], device="cuda") if ragged else None
        arguments = (
            *(x, weight, packed(weight), alpha_in if snake_in else None, bias, residual, alpha_out, lengths),
            *(dilation, taps - 1, keep),
        )
        results = conv1d_snake(*arguments, run=RUN)
        eager, oracle = single_file.reference(*arguments), single_file.reference(*doubles(arguments))
        for result, chained, exact in zip(results, eager, oracle, strict=True):
            if exact.numel():
                same_precision(result, chained, exact)
                assert (result.double() - exact).abs().amax() <= 0.02 * exact.abs().amax()
        assert results[0].numel() == (results[1].numel() if keep else 0)
    assert not TALLIES.of(RUN.receipt).fallbacks
