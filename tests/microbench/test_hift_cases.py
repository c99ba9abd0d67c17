"""The committed HiFT cases are what the released generators call, and make contests whose arms agree."""

from collections import Counter

import hift_classes
import pytest
import torch

from voxfuse.kernels._op import Run
from voxfuse.microbench.arms import contest
from voxfuse.microbench.cases import load_cases
from voxfuse.microbench.judge import error_fp64
from voxfuse.microbench.timer import HostClock
from voxfuse.microbench.vocoder_arms import SnakeBlock

SMALLEST = [judged for judged in load_cases("cosyvoice2") if judged.case.name.endswith("1 row, 2 s")]


PER_BLOCK = {
    "block": 1,
    "snake_conv_pair": 1,
    "conv1d_snake": 2,
}  # one pair has the dilation, two of three a Snake behind


@pytest.mark.parametrize("stack", hift_classes.MODULES)
def test_blocks_are_those_of_the_released_generator(stack):
    hift = hift_classes.generator(stack, **hift_classes.RELEASED, in_channels=80, base_channels=512)
    seen = Counter()
    for block in (*hift.resblocks, *hift.source_resblocks):
        (taps,) = block.convs1[0].kernel_size
        block.register_forward_hook(lambda _, inputs, __, taps=taps: seen.update([(*inputs[0].shape[1:], taps)]))
    with torch.no_grad():
        hift.decode(torch.randn(1, 80, 1), torch.randn(1, 1, 480))
    for judged in load_cases(stack):
        if "taps" in judged.case.parameters:
            _, channels, frames = judged.case.tensors["x"].shape
            mel = frames // {256: 8, 128: 40, 64: 120}[channels]
            upsampled = (frames - frames % 2) // mel + frames % 2  # of one mel frame; the last stage has one more
            blocks = seen[channels, upsampled, judged.case.parameters["taps"]]
            each = PER_BLOCK[judged.case.parameters.get("operation", "block")]
            assert blocks * each == judged.calls


@pytest.mark.parametrize("stack", hift_classes.MODULES)
def test_the_judged_block_is_upstreams(stack):
    causal = stack == "cosyvoice3"
    block = SnakeBlock(6, 3, causal)
    real = hift_classes.upstream(stack).ResBlock(6, 3, [1, 3, 5], **({"causal": True} if causal else {}))
    real.load_state_dict(block.state_dict())
    x = torch.randn(2, 6, 30)
    assert torch.equal(block(x), real(x))


@pytest.mark.parametrize("judged", [SMALLEST[i] for i in (0, 3, 4)], ids=lambda judged: judged.case.name)
def test_a_contest_has_the_declared_signatures_and_agreeing_arms(judged):
    run = Run("reference", "test")
    made = contest(
        judged.fusion, judged.case, torch.device("cpu"), HostClock(), run,
        {"launch_floor_us": 1.0, "peak_tf32_flop_per_s": 1e12}, "eager",
    )  # fmt: skip
    assert tuple(made.sets[0][0].shape) == judged.case.tensors["x"].shape
    with torch.no_grad():
        oracle = made.seen(made.eager(*(v.double() if isinstance(v, torch.Tensor) else v for v in made.sets[0])))
        assert error_fp64(made.seen(made.voxfuse(*made.sets[0])), oracle) < 1e-5
        assert error_fp64(made.seen(made.baselines["compile"](*made.sets[0])), oracle) < 1e-5
