"""The source whose phase is stepped frame by frame against its chain in fp64."""

import pytest
import torch
from frame_sources import (
    AMPLITUDE,
    NOISE_STD,
    SIZES,
    THRESHOLD,
    check_no_samples,
    check_precision,
    check_rows,
    stepped_case,
    wide,
)  # fmt: skip

from voxfuse.kernels import sine_source as sine_module
from voxfuse.kernels import stepped_source as stepped_module
from voxfuse.kernels.stepped_source import stepped_source


@pytest.mark.parametrize(("rows", "frames", "scale", "harmonics"), SIZES)
def test_same_precision_as_upstream(rows, frames, scale, harmonics, device, run, same_precision, poisoned_empty):
    check_precision(stepped_case(rows, frames, scale, device, harmonics), run, same_precision)


def test_a_stepped_phase_over_minutes(device, run, monkeypatch):
    """Two minutes: the last second is as good as the first."""
    monkeypatch.setattr(sine_module, "BLOCK_SAMPLES", 16_384)  # fewer programs to interpret
    frames, scale, rate = 120 * 20, 80, 1600.0
    f0 = (150 + 20 * torch.sin(torch.arange(frames) / 20.0)).unsqueeze(0).to(device)
    initial = torch.zeros(1, 9, device=device)
    initial[:, 1:] = torch.rand(1, 8) - 0.5
    noise = torch.zeros(1, frames * scale, 9, device=device)
    tensors = f0, initial, noise, torch.full((1, 9), 0.5, device=device), torch.zeros(1, device=device)
    numbers = scale, rate, AMPLITUDE, NOISE_STD, THRESHOLD
    exact = stepped_module.reference(*wide(tensors), None, *numbers)[:, -1600:]
    found = stepped_source(*tensors, None, *numbers, run=run)[:, -1600:]
    assert ((found.double() - exact).norm() / exact.norm()).item() < 3e-7


def test_each_row_equals_itself_alone_at_its_valid_length(device, run, poisoned_empty):
    check_rows(stepped_case, device, run, second_by_frame=False)


def test_no_samples(device, run):
    check_no_samples(stepped_case, device, run)


def test_outside_the_envelope_the_reasons_are_named(device):
    op, _, (f0, initial, noise, weight, bias), settings = stepped_case(2, 6, 40, device)
    reason = op.unsupported
    at_samples = f0.repeat_interleave(40, 1)
    assert reason(f0, initial, noise, weight, bias, None, *settings) is None
    assert "one value for each frame" in reason(at_samples, initial, noise, weight, bias, None, *settings)
    assert "initial must be" in reason(f0, initial[:, :4], noise, weight, bias, None, *settings)
