"""The harmonic source against the upstream chain in fp64: phase over minutes, both rates of f0, lengths."""

import pytest
import torch

from voxfuse.kernels import sine_source as module
from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.sine_source import reference, sine_source

RATE, AMPLITUDE, NOISE_STD, THRESHOLD = 24_000.0, 0.1, 0.003, 10.0


def case(rows, frames, scale, device, harmonics=9, held=True):
    """f0 in Hz with unvoiced, zero and negative frames; initial phases; noise [rows, harmonics, samples] in memory."""
    f0 = 80 + 200 * torch.rand(rows, frames if held else frames * scale)
    f0[:, 3::7] = 0
    f0[:, 4::9] = -3
    noise = torch.randn(rows, harmonics, frames * scale).transpose(1, 2)
    weight, bias = torch.randn(1, harmonics) * 0.7, torch.randn(1) * 0.1
    return [value.to(device) for value in (f0, torch.rand(rows, harmonics), noise, weight, bias)]


def settings(scale):
    return scale, RATE, AMPLITUDE, NOISE_STD, THRESHOLD


def oracle(tensors, scale):
    return reference(*(value.double() for value in tensors), None, *settings(scale))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    ("rows", "frames", "scale", "harmonics"),
    [(2, 1, 300, 9), (1, 2, 300, 9), (2, 4, 300, 1), (3, 13, 40, 9), (1, 30, 3, 9), (1, 30, 4, 16), (2, 11, 5, 2)],
)
def test_same_precision_as_upstream(rows, frames, scale, harmonics, held, device, run, same_precision, poisoned_empty):
    tensors = case(rows, frames, scale, device, harmonics, held)
    result = sine_source(*tensors, None, *settings(scale), run=run)
    same_precision(result, reference(*tensors, None, *settings(scale)), oracle(tensors, scale))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_f0_held_and_f0_upsampled_give_the_same_bits(device, run):
    f0, *rest = case(2, 9, 40, device)
    held = sine_source(f0, *rest, None, *settings(40), run=run)
    assert torch.equal(sine_source(f0.repeat_interleave(40, 1), *rest, None, *settings(40), run=run), held)


def test_a_fundamental_above_the_sampling_rate_wraps_as_upstreams(device, run, same_precision):
    f0, *rest = case(1, 12, 40, device)
    tensors = [f0 * 150, *rest]
    result = sine_source(*tensors, None, *settings(40), run=run)
    same_precision(result, reference(*tensors, None, *settings(40)), oracle(tensors, 40))


@pytest.mark.parametrize("held", [True, False])
def test_each_row_equals_itself_alone_at_its_valid_length(held, device, run, same_precision, poisoned_empty):
    lengths, scale = [20, 19, 7, 2, 1, 0], 40
    f0, initial, noise, weight, bias = case(len(lengths), 20, scale, device, held=held)
    for row, length in enumerate(lengths):
        f0[row, length if held else length * scale :] = torch.nan
        noise[row, length * scale :] = torch.nan
    result = sine_source(
        f0, initial, noise, weight, bias, torch.tensor(lengths, device=device), *settings(scale), run=run
    )
    for row, length in enumerate(lengths):
        samples = length * scale
        assert torch.all(result[row, samples:] == 0), "the tail behind a row's valid length is not zero"
        if length:
            one = slice(row, row + 1)
            alone = [f0[one, : length if held else samples], initial[one], noise[one, :samples], weight, bias]
            found = result[one, :samples]
            assert torch.equal(found, sine_source(*alone, None, *settings(scale), run=run))
            same_precision(found, reference(*alone, None, *settings(scale)), oracle(alone, scale))


def test_lengths_in_int32_and_the_reference_agree(device, run):
    tensors = case(3, 6, 40, device)
    lengths = torch.tensor([6, 2, 0], device=device)
    wide = sine_source(*tensors, lengths, *settings(40), run=run)
    assert torch.equal(sine_source(*tensors, lengths.int(), *settings(40), run=run), wide)
    torch.testing.assert_close(wide, reference(*tensors, lengths, *settings(40)), rtol=1e-3, atol=1e-5)


def test_phase_over_minutes(device, run, same_precision, monkeypatch):
    """Three minutes at 20 frames a second. The last second must be as good as the first; upstream's fp32 sums drift."""
    monkeypatch.setattr(module, "BLOCK_SAMPLES", 16_384)  # fewer programs to interpret
    frames, scale, rate = 180 * 20, 80, 1600.0
    f0 = (150 + 20 * torch.sin(torch.arange(frames) / 20.0)).unsqueeze(0).to(device)
    noise = torch.zeros(1, frames * scale, 9, device=device)
    weight, bias = torch.full((1, 9), 0.5, device=device), torch.zeros(1, device=device)
    numbers = scale, rate, AMPLITUDE, NOISE_STD, THRESHOLD
    tensors = f0, torch.rand(1, 9, device=device), noise, weight, bias
    exact = reference(*(value.double() for value in tensors), None, *numbers)
    result = sine_source(*tensors, None, *numbers, run=run)
    last = slice(-int(rate), None)
    error = ((result.double() - exact)[:, last].norm() / exact[:, last].norm()).item()
    drift = ((reference(*tensors, None, *numbers) - exact)[:, last].norm() / exact[:, last].norm()).item()
    assert error < 2e-7 and drift > 0.01, (error, drift)


@pytest.mark.parametrize("layout", ["noise by harmonic last", "strided f0", "expanded rows"])
def test_any_strides(layout, device, run, same_precision):
    tensors = case(2, 6, 40, device)
    if layout == "noise by harmonic last":
        tensors[2] = tensors[2].contiguous()
    elif layout == "strided f0":
        tensors[0] = torch.stack([tensors[0], tensors[0] + 50], dim=2)[:, :, 1]
    else:
        tensors[:3] = (value[:1].expand(value.shape) for value in tensors[:3])
    result = sine_source(*tensors, None, *settings(40), run=run)
    same_precision(result, reference(*tensors, None, *settings(40)), oracle(tensors, 40))


def test_no_samples(device, run):
    for rows, frames in ((0, 5), (2, 0)):
        tensors = case(rows, frames, 40, device)
        assert sine_source(*tensors, None, *settings(40), run=run).shape == (rows, frames * 40)


def test_outside_the_envelope_the_reference_runs_and_is_counted(device, run):
    tensors = [value.double() for value in case(1, 6, 40, device)]
    assert torch.equal(sine_source(*tensors, None, *settings(40), run=run), oracle(tensors, 40))
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "torch.float64" in reason and TALLIES.of(run.receipt).calls == 0


def test_wrong_shapes_are_named(device):
    f0, initial, noise, weight, bias = case(2, 6, 40, device)
    rest = settings(40)
    assert "scale must be at least 3" in sine_source.unsupported(f0, initial, noise, weight, bias, None, 2, *rest[1:])
    assert "divided by the scale 40" in sine_source.unsupported(f0[:, :5], initial, noise, weight, bias, None, *rest)
    assert "9 (at most 16)" in sine_source.unsupported(f0, initial, noise, weight[:, :8], bias, None, *rest)
    assert "lengths must be" in sine_source.unsupported(f0, initial, noise, weight, bias, torch.tensor([1]), *rest)
