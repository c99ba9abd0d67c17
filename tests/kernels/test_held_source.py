"""The merged source of frame-constant sines, and the stepped source, against their chains in fp64."""

import pytest
import torch

from voxfuse.kernels import held_source as held_module
from voxfuse.kernels import sine_source as sine_module
from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.held_source import held_source
from voxfuse.kernels.sine_source import stepped_source

RATE, AMPLITUDE, NOISE_STD, THRESHOLD = 24_000.0, 0.1, 0.003, 10.0


def frequencies(rows, frames):
    """Hz, with unvoiced, zero and negative frames."""
    f0 = 80 + 200 * torch.rand(rows, frames)
    f0[:, 3::7] = 0
    f0[:, 4::9] = -3
    return f0


def held_case(rows, frames, scale, device, harmonics=9, held=True):
    """Tensors and settings; the same noise for all rows, as upstream has it."""
    f0 = frequencies(rows, frames if held else frames * scale)
    sines = torch.sin(7 * torch.randn(rows, harmonics, frames)).transpose(1, 2)
    noise = torch.rand(1, frames * scale, harmonics).to(device).expand(rows, -1, -1)
    weight, bias = torch.randn(1, harmonics) * 0.7, torch.randn(1) * 0.1
    tensors = [value.to(device) for value in (sines, f0)] + [noise, weight.to(device), bias.to(device)]
    return held_source, held_module.reference, tensors, (scale, AMPLITUDE, NOISE_STD, THRESHOLD)


def stepped_case(rows, frames, scale, device, harmonics=9):
    initial = torch.rand(rows, harmonics) - 0.5
    initial[:, 0] = 0
    noise = torch.randn(rows, harmonics, frames * scale).transpose(1, 2)
    weight, bias = torch.randn(1, harmonics) * 0.7, torch.randn(1) * 0.1
    tensors = [value.to(device) for value in (frequencies(rows, frames), initial, noise, weight, bias)]
    return stepped_source, sine_module.stepped_reference, tensors, (scale, RATE, AMPLITUDE, NOISE_STD, THRESHOLD)


CASES = {"held": held_case, "stepped": stepped_case}


def wide(tensors):
    return [tensor.double() for tensor in tensors]


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(
    ("rows", "frames", "scale", "harmonics"),
    [(2, 1, 480, 9), (1, 2, 480, 9), (3, 13, 40, 9), (1, 17, 3, 1), (1, 30, 4, 16), (2, 15, 5, 2), (33, 2, 7, 9)],
)
def test_same_precision_as_upstream(kind, rows, frames, scale, harmonics, device, run, same_precision, poisoned_empty):
    op, reference, tensors, settings = CASES[kind](rows, frames, scale, device, harmonics)
    result = op(*tensors, None, *settings, run=run)
    same_precision(result, reference(*tensors, None, *settings), reference(*wide(tensors), None, *settings))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_f0_of_samples(device, run, same_precision):
    op, reference, tensors, settings = held_case(2, 6, 40, device, held=False)
    result = op(*tensors, None, *settings, run=run)
    same_precision(result, reference(*tensors, None, *settings), reference(*wide(tensors), None, *settings))


@pytest.mark.parametrize("kind", CASES)
def test_each_row_equals_itself_alone_at_its_valid_length(kind, device, run, poisoned_empty):
    lengths, scale = [20, 19, 7, 2, 1, 0], 40
    op, _, tensors, settings = CASES[kind](len(lengths), 20, scale, device)
    together = op(*tensors, torch.tensor(lengths, device=device), *settings, run=run)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        first, second, noise, *linear = tensors
        second = second[one, :length] if kind == "held" else second[one]  # f0, and initial phases
        alone = op(first[one, :length], second, noise[one, : length * scale], *linear, None, *settings, run=run)
        assert torch.equal(together[one, : length * scale], alone)
        assert torch.all(together[row, length * scale :] == 0)


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
    exact = sine_module.stepped_reference(*wide(tensors), None, *numbers)[:, -1600:]
    found = stepped_source(*tensors, None, *numbers, run=run)[:, -1600:]
    assert ((found.double() - exact).norm() / exact.norm()).item() < 3e-7


@pytest.mark.parametrize("kind", CASES)
def test_no_samples(kind, device, run):
    for rows, frames in ((0, 5), (2, 0)):
        op, _, tensors, settings = CASES[kind](rows, frames, 40, device)
        assert op(*tensors, None, *settings, run=run).shape == (rows, frames * 40)


def test_outside_the_envelope_the_reasons_are_named(device):
    op, _, (sines, f0, noise, weight, bias), settings = held_case(2, 6, 40, device)
    reason = op.unsupported
    assert reason(sines, f0, noise, weight, bias, None, *settings) is None
    assert "fp32" in reason(sines.double(), f0, noise, weight, bias, None, *settings)
    assert "noise must be" in reason(sines, f0, noise[:, :5], weight, bias, None, *settings)
    assert "times the scale 40" in reason(sines, f0[:, :5], noise, weight, bias, None, *settings)
    assert "at most 16" in reason(sines, f0, noise, weight[:, :8], bias, None, *settings)
    assert "lengths must be" in reason(sines, f0, noise, weight, bias, torch.tensor([1]), *settings)
    op, _, (f0, initial, noise, weight, bias), settings = stepped_case(2, 6, 40, device)
    reason = op.unsupported
    at_samples = f0.repeat_interleave(40, 1)
    assert reason(f0, initial, noise, weight, bias, None, *settings) is None
    assert "one value for each frame" in reason(at_samples, initial, noise, weight, bias, None, *settings)
    assert "initial must be" in reason(f0, initial[:, :4], noise, weight, bias, None, *settings)
