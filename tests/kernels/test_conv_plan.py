"""Convolutions of several frames as one, with zeros where a plan wants them, against torch's dilated one in fp64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.kernels._conv_plan import FASTEST, FIRST, FIRST_2, FIRST_4, LAST, LAST_2, LAST_4, Plan, fastest
from voxfuse.kernels._phases import from_phases, to_phases
from voxfuse.kernels.conv1d import convolved, grouped, layout_for

PLANS = [Plan(axis, together) for axis, together in itertools.product(["taps_first", "taps_last"], [1, 2, 4])]


class CausalConv1d(nn.Conv1d):
    """As CosyVoice3 tells where its zeros are."""

    def __init__(self, channels, out, taps, dilation, causal_type):
        super().__init__(channels, out, taps, dilation=dilation, dtype=torch.float64)
        self.causal_padding, self.causal_type = dilation * (taps - 1), causal_type


def convolution(side, taps, dilation):
    if side == "both":
        padding = dilation * (taps // 2)
        return nn.Conv1d(3, 5, taps, dilation=dilation, padding=padding, dtype=torch.float64)
    return CausalConv1d(3, 5, taps, dilation, side)


def upstream(conv, x, side):
    """x [rows, frames, channels], the zeros put there by a copy."""
    span = conv.dilation[0] * (conv.kernel_size[0] - 1)
    zeros = {"left": (span, 0), "right": (0, span), "both": (span // 2, span // 2)}[side]
    return F.conv1d(F.pad(x.transpose(1, 2), zeros), conv.weight, dilation=conv.dilation).transpose(1, 2)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("taps", "dilation"), list(itertools.product([1, 3, 5, 7, 11, 13], [1, 3, 5])))
@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_every_plan_is_the_dilated_convolution(side, taps, dilation, plan):
    if side == "right" and dilation > 1:
        return  # refused: conv_unsupported
    conv = convolution(side, taps, dilation)
    for frames in (*range(1, 18), 61):
        x = torch.randn(2, frames, 3, dtype=torch.float64)
        layout = layout_for(conv, plan, frames)
        assert min(layout) >= 0 and (layout.held(frames) // dilation) % plan.together == 0
        y = convolved(conv, to_phases(x, *layout), plan)
        assert y.shape[1] % dilation == 0 and y.shape[1] >= frames
        torch.testing.assert_close(from_phases(y, frames, dilation), upstream(conv, x, side), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("taps", [1, 3, 5, 7, 9, 11])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padding_is_no_more_than_half_of_the_taps(side, taps, plan):
    """Beyond it cuDNN takes kernels three times as slow."""
    before = {"left": taps - 1, "right": 0, "both": taps // 2}[side]
    assert 0 <= plan.padding(taps, before) <= plan.spans(taps) // 2


def test_zeros_are_made_only_where_padding_is_not_enough():
    for taps, dilation, frames in itertools.product([3, 7, 11], [1, 3, 5], [1, 16, 17]):
        assert layout_for(convolution("both", taps, dilation), LAST, frames) == (dilation, 0, 0)
        assert layout_for(convolution("left", taps, dilation), LAST, frames) == (dilation, taps // 2, 0)


def test_frames_as_one_multiply_the_same_weights():
    weight = torch.randn(5, 3, 2)
    for together in (1, 2, 4):
        blocks = grouped(weight, together)
        assert blocks.shape[0] == 5 * together and blocks.shape[2] == 2 * together and blocks.is_contiguous()
        assert torch.equal(blocks.abs().sum(), weight.abs().sum() * together) or torch.isclose(
            blocks.abs().sum(), weight.abs().sum() * together
        )
    assert torch.equal(grouped(weight, 1), weight)


@pytest.mark.parametrize(
    ("rows", "frames", "channels", "taps", "dilation", "plan"),
    [
        (16, 60_001, 64, 11, 1, FIRST_4),
        (16, 60_001, 64, 7, 5, FIRST),
        (16, 20_000, 128, 3, 1, LAST_2),
        (16, 20_000, 128, 7, 3, FIRST_2),
        (16, 20_000, 128, 11, 1, LAST),
        (16, 4000, 256, 3, 1, LAST),
        (8, 48_001, 128, 7, 5, FIRST_2),
        (1, 60_001, 64, 11, 1, LAST_4),
        (1, 60_001, 64, 11, 3, FIRST_2),
        (1, 20_000, 128, 3, 3, FIRST),
        (1, 4000, 1024, 3, 1, LAST),
    ],
)
def test_the_plan_is_the_one_measured(rows, frames, channels, taps, dilation, plan):
    assert fastest(rows, frames, channels, taps, dilation) == plan
    assert {known.axis for plans in FASTEST.values() for known in plans} == {"taps_first", "taps_last"}
