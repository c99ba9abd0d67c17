"""Bias, residual and Snake in one pass, against upstream's chain in fp64."""

import itertools

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels._phases import PLAIN, from_phases, padded_frames, to_phases
from voxfuse.kernels.snake import snake


def case(rows, frames, channels, device, dtype=torch.float32):
    """x, bias, residual, alpha: real-looking values."""
    values = (
        torch.randn(rows, frames, channels) * 3,
        torch.randn(channels),
        torch.randn(rows, frames, channels),
        torch.exp(torch.randn(channels)),
    )
    return [value.to(device, dtype) for value in values]


def in_fp64(tensors):
    return [None if value is None else value.double() for value in tensors]


def chain(x, bias, residual, alpha):
    """Upstream's lines, the channels along the last axis: conv + bias + x, and Snake.forward of it."""
    raw = x if bias is None else x + bias
    raw = raw if residual is None else raw + residual
    return raw, raw + (1.0 / (alpha + 0.000000001)) * torch.pow(torch.sin(raw * alpha), 2)


def fused(tensors, lengths, run, x_phases=1, layout=PLAIN, keep=True):
    """r and y in plain order; x in plain order is brought into phases first."""
    x, *rest = tensors
    frames = x.shape[1]
    x = x if x_phases == 1 else to_phases(x, x_phases)
    raw, y = snake(x, *rest, lengths, frames, x_phases, *layout, keep, run=run)
    assert raw.is_contiguous() and y.is_contiguous()
    y_phases, lead, tail = layout
    assert y.shape[1] == padded_frames(frames, y_phases) + y_phases * (lead + tail)
    plain = from_phases(y, y.shape[1], y_phases)
    zeros = plain[:, : y_phases * lead], plain[:, y_phases * lead + frames :]
    assert all(torch.all(part == 0) for part in zeros), "what lies around the frames for the convolution is not zero"
    return raw, plain[:, y_phases * lead :][:, :frames]


@pytest.mark.parametrize("phases", list(itertools.product([1, 3, 5], [1, 3, 5])))
def test_same_precision_as_upstream_at_awkward_sizes(phases, device, run, same_precision, poisoned_empty):
    for rows, frames, channels in ((2, 1, 64), (1, 2, 33), (3, 15, 8), (2, 16, 7), (1, 129, 1), (1, 70, 130)):
        tensors = case(rows, frames, channels, device)
        raw, y = fused(tensors, None, run, phases[0], (phases[1], 0, 0))
        eager, oracle = chain(*tensors), chain(*in_fp64(tensors))
        assert torch.equal(raw, eager[0]), "the sum has other bits than eager's"
        same_precision(y, eager[1], oracle[1])
    assert TALLIES.of(run.receipt).calls == 6 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("layout", [(1, 5, 0), (1, 0, 3), (1, 70, 5), (3, 1, 2), (5, 6, 1)])
@pytest.mark.parametrize("keep", [True, False])
def test_zeros_in_front_of_and_behind_each_phase(layout, keep, device, run, same_precision, poisoned_empty):
    for rows, frames, channels in ((2, 1, 64), (2, 16, 7), (1, 129, 33)):
        tensors = case(rows, frames, channels, device)
        lengths = torch.tensor([frames, (frames + 1) // 2][:rows], device=device)
        raw, y = fused(tensors, lengths, run, 3, layout, keep)
        eager, oracle = chain(*tensors), chain(*in_fp64(tensors))
        for row, length in enumerate(lengths.tolist()):
            same_precision(y[row, :length], eager[1][row, :length], oracle[1][row, :length])
            assert torch.all(y[row, length:] == 0)
            assert not keep or torch.equal(raw[row, :length], eager[0][row, :length])
            assert torch.all(raw[row, length:] == 0) if keep else raw.numel() == 0


@pytest.mark.parametrize("missing", [(1,), (2,), (1, 2)])
def test_without_bias_or_residual(missing, device, run, same_precision, poisoned_empty):
    tensors = [None if i in missing else value for i, value in enumerate(case(2, 37, 12, device))]
    raw, y = fused(tensors, None, run, 3)
    assert torch.equal(raw, chain(*tensors)[0])
    same_precision(y, chain(*tensors)[1], chain(*in_fp64(tensors))[1])


def test_only_what_is_asked_for_is_written(device, run, poisoned_empty):
    x, bias, residual, alpha = tensors = case(2, 20, 8, device)
    raw, y = snake(x, bias, residual, None, None, 20, 1, *PLAIN, True, run=run)
    assert torch.equal(raw, chain(*tensors)[0]) and y.numel() == 0
    raw, y = snake(x, bias, residual, alpha, None, 20, 1, *PLAIN, False, run=run)
    assert raw.numel() == 0
    torch.testing.assert_close(y, chain(*tensors)[1], rtol=1e-6, atol=1e-6)
    assert [part.numel() for part in snake(x, bias, residual, None, None, 20, 1, *PLAIN, False, run=run)] == [0, 0]


def test_each_row_ends_at_its_own_length_whatever_stands_behind(device, run, poisoned_empty):
    lengths = [40, 39, 17, 1, 0]
    x, bias, residual, alpha = case(len(lengths), 40, 8, device)
    expected = chain(x, bias, residual, alpha)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
        residual[row, length:] = torch.inf
    results = fused((x, bias, residual, alpha), torch.tensor(lengths, device=device), run, 5, (3, 2, 1))
    for result, chained in zip(results, expected, strict=True):
        for row, length in enumerate(lengths):
            torch.testing.assert_close(result[row, :length], chained[row, :length], rtol=2e-6, atol=2e-6)
            assert torch.all(result[row, length:] == 0)


def test_alpha_near_zero_and_of_either_sign(device, run, poisoned_empty):
    """alpha = -1e-9 divides by zero upstream, and does here: NaN where the sine is zero, infinity elsewhere."""
    x, bias, residual, _ = case(1, 50, 8, device)
    alpha = torch.tensor([0.0, 1e-30, 1e-12, -1e-12, 1e-6, -0.5, 1e3, -1e-9], device=device)
    _, y = fused((x, bias, residual, alpha), None, run)
    _, oracle = chain(*in_fp64((x, bias, residual, alpha)))
    raw = (x + bias + residual)[0]
    assert torch.equal(y[0, :, 0], raw[:, 0]), "alpha 0 must leave the sum"
    torch.testing.assert_close(y[..., :7].double(), oracle[..., :7], rtol=1e-6, atol=1e-5)
    assert torch.all(torch.isinf(y[0, :, 7]) | torch.isnan(y[0, :, 7]))


@pytest.mark.parametrize(("size", "bound"), [(1e3, 5e-7), (1e6, 2e-6)])
def test_large_arguments_of_the_sine(size, bound, device, run):
    x = ((torch.rand(1, 4000, 8) - 0.5) * 2 * size).to(device)
    alpha = torch.ones(8, device=device)
    _, y = snake(x, None, None, alpha, None, 4000, 1, *PLAIN, False, run=run)
    squared = (y.double() - x.double()).abs()
    ulp = torch.finfo(torch.float32).eps * x.double().abs()
    assert torch.all((squared - x.double().sin().square()).abs() <= bound + ulp)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype, device, run, same_precision):
    tensors = case(1, 100, 40, device, dtype=dtype)
    raw, y = fused(tensors, None, run, 1, (3, 0, 0))
    assert raw.dtype == y.dtype == dtype
    for result, eager, oracle in zip((raw, y), chain(*tensors), chain(*in_fp64(tensors)), strict=True):
        same_precision(result, eager, oracle)


def test_fp16_near_overflow_stays_finite_where_eager_does(device, run):
    x = torch.full((1, 3, 4), 60_000.0, dtype=torch.float16, device=device)
    raw, y = fused((x, None, None, torch.full((4,), 0.5, dtype=torch.float16, device=device)), None, run)
    assert torch.all(torch.isfinite(raw)) and torch.all(torch.isfinite(y))


def test_strided_and_transposed_inputs(device, run, poisoned_empty):
    _, bias, _, alpha = case(1, 1, 6, device)
    x = torch.randn(2, 6, 45, device=device).transpose(1, 2)[:, 2:42]
    residual = torch.randn(2, 50, 9, device=device)[:, 4:44, 2:8]
    raw, y = snake(x, bias, residual, alpha, None, 40, 1, 5, 1, 1, True, run=run)
    expected = chain(x, bias, residual, alpha)
    assert torch.equal(raw, expected[0])
    torch.testing.assert_close(from_phases(y, 40, 5, 1), expected[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(0, 20, 4), (2, 20, 0), (2, 0, 4)])
def test_zero_sizes_return_at_once(shape, device, run):
    raw, y = fused(case(*shape, device), None, run)
    assert raw.shape == y.shape == shape


def test_outside_the_envelope_the_reference_runs_and_is_counted(device, run):
    tensors = in_fp64(case(2, 31, 4, device))
    raw, y = fused(tensors, torch.tensor([31, 9], device=device), run, 3, (5, 1, 2))
    expected = chain(*tensors)
    for result, chained in zip((raw, y), expected, strict=True):
        torch.testing.assert_close(result[0], chained[0])
        torch.testing.assert_close(result[1, :9], chained[1, :9])
        assert torch.all(result[1, 9:] == 0)
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "float64" in reason and TALLIES.of(run.receipt).calls == 0


def test_wrong_shapes_are_named(device):
    x, bias, residual, alpha = case(2, 30, 4, device)
    lengths = torch.tensor([30, 3], device=device)

    def reason(x=x, bias=bias, residual=residual, alpha=alpha, lengths=lengths, frames=30, phases=1, lead=0):
        return snake.unsupported(x, bias, residual, alpha, lengths, frames, phases, 1, lead, 0, True)

    assert reason() is None
    assert "31 frames" in reason(frames=31)
    assert "4 phases alike of together at least 32 frames" in reason(phases=4)
    assert "-1 in front" in reason(lead=-1)
    assert "alpha" in reason(alpha=alpha[:3]) and "alpha" in reason(alpha=alpha.half())
    assert "bias" in reason(bias=bias[:3]) and "residual" in reason(residual=residual[:, :4])
    assert "lengths" in reason(lengths=lengths[:1])
