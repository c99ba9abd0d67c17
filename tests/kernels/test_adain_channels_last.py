"""AdaIN channels last from known moments, against upstream's instance norm in fp64."""

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels._phases import from_phases, padded_frames, to_phases
from voxfuse.kernels.adain import reference as upstream
from voxfuse.kernels.adain_channels_last import adain_channels_last
from voxfuse.kernels.moments import BLOCK_FRAMES, moments_reference

EPS, SLOPE = 1e-5, 0.2


def case(rows, frames, channels, device, *, snake=True, dtype=torch.float32, affine=True, offset=2.0):
    """x, style, weight, bias, alpha: real-looking values, x with a mean of the size of its deviation."""
    x = torch.randn(rows, frames, channels) * 3 + offset
    style = torch.randn(rows, 2 * channels) * 0.5
    weight, bias = (torch.rand(channels) + 0.5, torch.randn(channels)) if affine else (None, None)
    alpha = torch.rand(1, channels, 1) * 3 + 0.2 if snake else None
    return [None if value is None else value.to(device, dtype) for value in (x, style, weight, bias, alpha)]


def fused(tensors, lengths, run, y_phases=1, x_phases=1, lead=0, tail=0):
    """y in plain order; x in plain order is brought into phases first."""
    x, *rest = tensors
    frames = x.shape[1]
    exact = moments_reference(x.double(), lengths, frames, 1).float()
    x = x if x_phases == 1 else to_phases(x, x_phases)
    y = adain_channels_last(x, exact, *rest, lengths, frames, x_phases, y_phases, lead, tail, EPS, SLOPE, run=run)
    assert y.shape[1] == padded_frames(frames, y_phases) + y_phases * (lead + tail) and y.is_contiguous()
    plain, first = from_phases(y, y.shape[1], y_phases), y_phases * lead
    around = plain[:, :first], plain[:, first + frames :]
    assert all(torch.all(part == 0) for part in around), "the padding for the convolution is not zero"
    return plain[:, first : first + frames]


def chain(tensors):
    """Upstream's chain, channels last."""
    x, *rest = tensors
    return upstream(x.transpose(1, 2), *rest, None, EPS, SLOPE).transpose(1, 2)


def in_fp64(tensors):
    return [None if value is None else value.double() for value in tensors]


@pytest.mark.parametrize("snake", [True, False])
@pytest.mark.parametrize(
    ("rows", "frames", "channels", "phases"),
    [(2, 2, 32, (1, 5)), (3, 15, 33, (3, 1)), (1, 17, 64, (5, 3)), (2, BLOCK_FRAMES, 8, (1, 3)), (1, 9000, 6, (1, 1))],
)
def test_same_precision_as_upstream(rows, frames, channels, phases, snake, device, run, same_precision, poisoned_empty):
    tensors = case(rows, frames, channels, device, snake=snake)
    x_phases, y_phases = phases
    result = fused(tensors, None, run, y_phases, x_phases)
    same_precision(result, chain(tensors), chain(in_fp64(tensors)))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_each_row_equals_itself_alone_whatever_stands_behind(device, run, same_precision, poisoned_empty):
    lengths = [300, 299, 129, 128, 2, 1, 0]
    tensors = case(len(lengths), 300, 8, device)
    x, style, *rest = tensors
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    result = fused(tensors, torch.tensor(lengths, device=device), run, y_phases=3, lead=2, tail=1)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        assert torch.all(result[row, length:] == 0)
        if length > 1:
            alone = [x[one, :length], style[one], *rest]
            same_precision(result[one, :length], chain(alone), chain(in_fp64(alone)))
        elif length == 1:  # zero deviation leaves only the biases
            constant = torch.full((1, 2, 8), 3.0, device=device)
            biases = chain(in_fp64([constant, style[one], *rest]))[:, :1]
            torch.testing.assert_close(result[one, :1].double(), biases, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [1e3, -3e4])
def test_a_mean_far_above_the_deviation_does_not_cancel(offset, device, run, same_precision):
    tensors = case(1, 1000, 8, device, snake=False, offset=offset)
    same_precision(fused(tensors, None, run), chain(tensors), chain(in_fp64(tensors)))


def test_a_constant_row_has_no_variance(device, run):
    tensors = case(1, 300, 8, device)
    tensors[0].fill_(7.0)
    torch.testing.assert_close(fused(tensors, None, run).double(), chain(in_fp64(tensors)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype, device, run, same_precision):
    tensors = case(1, 100, 40, device, dtype=dtype)
    result = fused(tensors, None, run)
    assert result.dtype == dtype
    same_precision(result, chain(tensors), chain(in_fp64(tensors)))


def test_a_slice_of_a_wider_tensor_and_a_style_in_pieces(device, run, same_precision):
    tensors = case(2, 40, 6, device, affine=False)
    tensors[0] = torch.randn(2, 50, 9, device=device)[:, 4:44, 2:8]
    tensors[1] = torch.randn(2, 30, device=device)[:, 5:17]
    same_precision(fused(tensors, None, run, y_phases=3), chain(tensors), chain(in_fp64(tensors)))


@pytest.mark.parametrize("shape", [(0, 20, 4), (2, 20, 0)])
def test_zero_sizes_return_at_once(shape, device, run):
    assert fused(case(*shape, device), None, run).shape == shape


def test_outside_the_envelope_the_reference_runs_and_is_counted(device, run):
    tensors = in_fp64(case(2, 150, 4, device))
    x, *rest = tensors
    lengths = torch.tensor([150, 130], device=device)
    known = moments_reference(x, lengths, 150, 1)
    in_phases = to_phases(x, 3)
    result = adain_channels_last(in_phases, known, *rest, lengths, 150, 3, 7, 0, 0, EPS, SLOPE, run=run)
    result = from_phases(result, result.shape[1], 7)
    torch.testing.assert_close(result[:1, :150], chain([x[:1], rest[0][:1], *rest[1:]]))
    torch.testing.assert_close(result[1:, :130], chain([x[1:, :130], rest[0][1:], *rest[1:]]))
    assert torch.all(result[:, 150:] == 0) and torch.all(result[1, 130:] == 0)
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "float64" in reason and TALLIES.of(run.receipt).calls == 0


def test_wrong_shapes_are_named(device):
    x, style, weight, bias, alpha = case(2, 30, 4, device)
    known, lengths = moments_reference(x, None, 30, 1), torch.tensor([30, 3], device=device)

    def reason(
        x=x, known=known, style=style, weight=weight, bias=bias, alpha=alpha, lengths=lengths, frames=30, p=1, lead=0
    ):
        affine = weight, bias, alpha
        return adain_channels_last.unsupported(x, known, style, *affine, lengths, frames, p, 1, lead, 0, EPS, SLOPE)

    assert reason() is None
    assert "channels last" in reason(x=x.transpose(1, 2).contiguous().transpose(1, 2))
    assert "31 frames" in reason(frames=31)
    assert "4 phases alike of together at least 32 frames" in reason(p=4)
    assert "-1 in front" in reason(lead=-1)
    assert "moments" in reason(known=known[:, :, :1])
    assert "style" in reason(style=style[:, :5])
    assert "together" in reason(bias=None)
    assert "alpha" in reason(alpha=alpha[:, :3])
    assert "lengths" in reason(lengths=lengths[:1])
    assert "dtypes" in reason(style=style.half())
