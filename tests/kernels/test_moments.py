"""Bias, residual and moments in one pass, against plain torch in fp64."""

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels._phases import to_phases
from voxfuse.kernels.moments import BLOCK_FRAMES, MAX_CHUNKS, chunk_frames, moments, residual_moments

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def case(rows, frames, channels, device, *, spare=0, dtype=torch.float32, offset=2.0):
    """x with ``spare`` frames more than wanted, bias, residual."""
    x = torch.randn(rows, frames + spare, channels) * 3 + offset
    values = x, torch.randn(channels), torch.randn(rows, frames, channels)
    return [value.to(device, dtype) for value in values]


def assert_moments(found, y, lengths):
    """Against fp64 over each chunk's valid frames."""
    size = chunk_frames(y.shape[1])
    for row, length in enumerate(lengths):
        for chunk, (mean, m2) in enumerate(found[row].double()):
            part = y[row, chunk * size : min((chunk + 1) * size, length)].double()
            if part.shape[0]:
                torch.testing.assert_close(mean, part.mean(0), rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(m2, (part - part.mean(0)).square().sum(0), rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(mean, torch.zeros_like(mean)) and torch.equal(m2, mean)


@pytest.mark.parametrize("channels", [8, 33, 64])
@pytest.mark.parametrize("frames", [1, 2, BLOCK_FRAMES - 1, BLOCK_FRAMES, BLOCK_FRAMES + 1, 300])
def test_sum_and_moments(frames, channels, device, run, same_precision, poisoned_empty):
    x, bias, residual = case(2, frames, channels, device, spare=3)
    y, found = residual_moments(x, bias, residual, None, frames, 1, run=run)
    eager = x[:, :frames] + bias + residual
    same_precision(y, eager, x[:, :frames].double() + bias.double() + residual.double())
    assert_moments(found, y, [frames] * 2)
    assert y.is_contiguous() and TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("frames", [MAX_CHUNKS * BLOCK_FRAMES, MAX_CHUNKS * BLOCK_FRAMES + 1])
def test_a_row_has_at_most_the_declared_chunks(frames, device, run):
    x, *_ = case(1, frames, 4, device)
    found = moments(x, None, frames, 1, run=run)
    assert found.shape[1] <= MAX_CHUNKS
    assert_moments(found, x, [frames])


def test_each_row_to_its_length_whatever_stands_behind(device, run, poisoned_empty):
    lengths = [300, 129, 128, 1, 0]
    x, bias, residual = case(len(lengths), 300, 5, device)
    for row, length in enumerate(lengths):
        x[row, length:] = residual[row, length:] = torch.nan
    on_device = torch.tensor(lengths, device=device)
    y, found = residual_moments(x, bias, residual, on_device, 300, 1, run=run)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(y[row, :length], x[row, :length] + bias + residual[row, :length])
        assert torch.all(y[row, length:] == 0)
    assert_moments(found, y, lengths)
    assert torch.equal(moments(x, on_device.int(), 300, 1, run=run), moments(x, on_device, 300, 1, run=run))
    assert_moments(moments(x, on_device, 300, 1, run=run), x, lengths)


@pytest.mark.parametrize("phases", [2, 3, 5])
def test_x_in_phases_gives_the_bits_of_plain_order(phases, device, run):
    for frames in (2, 11, 150):
        x, bias, residual = case(2, frames, 5, device)
        lengths = torch.tensor([frames, 2], device=device)
        y, found = residual_moments(to_phases(x, phases), bias, residual, lengths, frames, phases, run=run)
        plain, expected = residual_moments(x, bias, residual, lengths, frames, 1, run=run)
        assert torch.equal(y, plain) and torch.equal(found, expected)
    assert f"{phases} phases" in residual_moments.unsupported(x[:, :101], bias, None, None, 99, phases)


@pytest.mark.parametrize("offset", [1e3, -3e4])
def test_a_mean_far_above_the_deviation_does_not_cancel(offset, device, run):
    x, *_ = case(1, 500, 8, device, offset=offset)
    mean, m2 = moments(x, None, 500, 1, run=run)[0].double().unbind(1)
    exact = torch.stack([part.double().var(0, correction=0) * len(part) for part in x[0].split(chunk_frames(500))])
    torch.testing.assert_close(m2, exact, rtol=1e-4, atol=0)
    assert mean.sub(offset).abs().max() < 3


@pytest.mark.parametrize("terms", ["none", "bias", "residual"])
@pytest.mark.parametrize("layout", ["channels first", "a slice of a wider tensor"])
def test_any_strides_and_missing_terms(layout, terms, device, run):
    x, bias, residual = case(2, 40, 6, device)
    if layout == "channels first":
        x, residual = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (x, residual))
    else:
        x, residual = torch.randn(2, 50, 9, device=device)[:, 4:, 2:8], torch.randn(4, 40, 6, device=device)[::2]
    bias = bias if terms == "bias" else None
    residual = residual if terms == "residual" else None
    y, found = residual_moments(x, bias, residual, None, 40, 1, run=run)
    expected = x[:, :40] + (0 if bias is None else bias) + (0 if residual is None else residual)
    assert torch.equal(y, expected)
    assert_moments(found, y, [40, 40])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_types_round_once_and_moments_are_of_the_rounded(dtype, device, run):
    x, bias, residual = case(1, 200, 7, device, dtype=dtype)
    y, found = residual_moments(x, bias, residual, None, 200, 1, run=run)
    exact = (x.double() + bias.double() + residual.double()).float()
    ulp = torch.finfo(dtype).eps * exact.abs().log2().floor().exp2()  # the interpreter truncates to bf16: below 1 ulp
    assert torch.all((y.float() - exact).abs() < (ulp if dtype == torch.bfloat16 else 0.5001 * ulp))
    assert found.dtype == torch.float32
    assert_moments(found, y, [200])


@pytest.mark.parametrize("shape", [(0, 20, 4), (2, 0, 4), (2, 20, 0)])
def test_zero_sizes_return_at_once(shape, device, run):
    x, bias, residual = case(*shape, device)
    y, found = residual_moments(x, bias, residual, None, shape[1], 1, run=run)
    assert y.shape == shape and found.numel() == 0


def test_outside_the_envelope_the_reference_runs_and_is_counted(device, run):
    x, bias, residual = (tensor.double() for tensor in case(1, 150, 4, device))
    y, found = residual_moments(x, bias, residual, None, 150, 1, run=run)
    torch.testing.assert_close(y, x + bias + residual)
    assert found.dtype == torch.float64
    assert_moments(found, y, [150])
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "float64" in reason and TALLIES.of(run.receipt).calls == 0


def test_wrong_shapes_are_named(device):
    x, bias, residual = case(2, 30, 4, device)
    lengths = torch.tensor([30, 3], device=device)
    assert residual_moments.unsupported(x, bias, residual, lengths, 30, 1) is None
    assert "at least 31 frames" in residual_moments.unsupported(x, bias, residual, lengths, 31, 1)
    assert "bias" in residual_moments.unsupported(x, bias[:3], residual, lengths, 30, 1)
    assert "residual" in residual_moments.unsupported(x, bias, residual[:, :29], lengths, 30, 1)
    assert "lengths" in residual_moments.unsupported(x, bias, residual, lengths[:1], 30, 1)
    assert "type" in residual_moments.unsupported(x, bias.half(), residual, lengths, 30, 1)
