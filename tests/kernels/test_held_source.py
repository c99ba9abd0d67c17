"""The merged source of frame-constant sines against its chain in fp64."""

import pytest
import torch
from frame_sources import SIZES, check_no_samples, check_precision, check_rows, held_case


@pytest.mark.parametrize(("rows", "frames", "scale", "harmonics"), SIZES)
def test_same_precision_as_upstream(rows, frames, scale, harmonics, device, run, same_precision, poisoned_empty):
    check_precision(held_case(rows, frames, scale, device, harmonics), run, same_precision)


def test_f0_of_samples(device, run, same_precision):
    check_precision(held_case(2, 6, 40, device, held=False), run, same_precision)


def test_each_row_equals_itself_alone_at_its_valid_length(device, run, poisoned_empty):
    check_rows(held_case, device, run, second_by_frame=True)


def test_no_samples(device, run):
    check_no_samples(held_case, device, run)


def test_outside_the_envelope_the_reasons_are_named(device):
    op, _, (sines, f0, noise, weight, bias), settings = held_case(2, 6, 40, device)
    reason = op.unsupported
    assert reason(sines, f0, noise, weight, bias, None, *settings) is None
    assert "fp32" in reason(sines.double(), f0, noise, weight, bias, None, *settings)
    assert "noise must be" in reason(sines, f0, noise[:, :5], weight, bias, None, *settings)
    assert "times the scale 40" in reason(sines, f0[:, :5], noise, weight, bias, None, *settings)
    assert "at most 16" in reason(sines, f0, noise, weight[:, :8], bias, None, *settings)
    assert "lengths must be" in reason(sines, f0, noise, weight, bias, torch.tensor([1]), *settings)
