"""AdaIN with Snake or LeakyReLU against the upstream chain in fp64."""

import itertools

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.adain import RESIDENT_FRAMES, STREAM_FRAMES, adain_act, reference

EPS, SLOPE = 1e-5, 0.2


def case(rows, channels, frames, *, snake, device, dtype=torch.float32, affine=True, offset=2.0):
    """x, style, weight, bias, alpha: real-looking values, x with a mean of the size of its deviation."""
    x = torch.randn(rows, channels, frames, dtype=dtype) * 3 + offset
    style = torch.randn(rows, 2 * channels, dtype=dtype) * 0.5
    weight = torch.rand(channels, dtype=dtype) + 0.5 if affine else None
    bias = torch.randn(channels, dtype=dtype) if affine else None
    alpha = torch.rand(1, channels, 1, dtype=dtype) * 3 + 0.2 if snake else None
    return [None if value is None else value.to(device) for value in (x, style, weight, bias, alpha)]


def in_fp64(tensors):
    return [None if value is None else value.double() for value in tensors]


def oracle(tensors, lengths=None):
    return reference(*in_fp64(tensors), lengths, EPS, SLOPE)


# Coefficients round once a channel, so that an RMS error means something only over several channels.
@pytest.mark.parametrize("snake", [True, False])
@pytest.mark.parametrize(
    ("rows", "channels", "frames"),
    [
        (4, 32, 2), (2, 32, 15), (3, 33, 16), (1, 64, 17), (33, 2, 129), (1, 4, 4095), (1, 4, 4097),
        (1, 8, RESIDENT_FRAMES), (1, 8, RESIDENT_FRAMES + 1), (2, 4, 2 * STREAM_FRAMES), (1, 8, 3 * STREAM_FRAMES + 7),
    ],
)  # fmt: skip
def test_same_precision_as_upstream(rows, channels, frames, snake, device, run, same_precision, poisoned_empty):
    tensors = case(rows, channels, frames, snake=snake, device=device)
    result = adain_act(*tensors, None, EPS, SLOPE, run=run)
    same_precision(result, reference(*tensors, None, EPS, SLOPE), oracle(tensors))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("frames", [300, 2 * STREAM_FRAMES + 100])
def test_each_row_equals_itself_alone_at_its_valid_length(frames, device, run, same_precision, poisoned_empty):
    lengths = [frames, frames - 1, frames // 2, 2, 1, 0]
    tensors = case(len(lengths), 8, frames, snake=True, device=device)
    result = adain_act(*tensors, torch.tensor(lengths, device=device), EPS, SLOPE, run=run)
    x, style, *rest = tensors
    for row, length in enumerate(lengths):
        assert torch.all(result[row, :, length:] == 0), "the tail behind a row's valid length is not zero"
        if length > 1:
            alone = [x[row : row + 1, :, :length], style[row : row + 1], *rest]
            same_precision(result[row : row + 1, :, :length], reference(*alone, None, EPS, SLOPE), oracle(alone))


def test_garbage_behind_the_valid_length_changes_nothing(device, run):
    tensors = case(1, 2, 200, snake=True, device=device)
    lengths = torch.tensor([150], device=device)
    clean = adain_act(*tensors, lengths, EPS, SLOPE, run=run)
    tensors[0][:, :, 150:] = torch.nan
    assert torch.equal(adain_act(*tensors, lengths, EPS, SLOPE, run=run), clean)


@pytest.mark.parametrize("frames", [300, STREAM_FRAMES + 300])
def test_lengths_outside_the_row_are_kept_within_it(frames, device, run):
    tensors = case(2, 2, frames, snake=True, device=device)
    wild = torch.tensor([10 * frames, -5], device=device)
    kept = torch.tensor([frames, 0], device=device)
    assert torch.equal(adain_act(*tensors, wild, EPS, SLOPE, run=run), adain_act(*tensors, kept, EPS, SLOPE, run=run))
    assert "int32 or int64" in adain_act.unsupported(*tensors, kept.float(), EPS, SLOPE)


def test_lengths_in_int32_and_int64_agree(device, run):
    tensors = case(2, 2, 64, snake=True, device=device)
    lengths = torch.tensor([64, 10], device=device)
    wide = adain_act(*tensors, lengths, EPS, SLOPE, run=run)
    assert torch.equal(adain_act(*tensors, lengths.int(), EPS, SLOPE, run=run), wide)


@pytest.mark.parametrize("frames", [500, STREAM_FRAMES + 500])
@pytest.mark.parametrize("offset", [1e3, -3e4])
def test_a_mean_far_above_the_deviation_does_not_cancel(frames, offset, device, run, same_precision):
    tensors = case(1, 2, frames, snake=False, device=device, offset=offset)
    result = adain_act(*tensors, None, EPS, SLOPE, run=run)
    same_precision(result, reference(*tensors, None, EPS, SLOPE), oracle(tensors))


@pytest.mark.parametrize("frames", [500, STREAM_FRAMES + 500])
def test_an_outlier_in_the_first_frame(frames, device, run, same_precision):
    tensors = case(1, 16, frames, snake=False, device=device)
    tensors[0][:, :, 0] = 1e4
    result = adain_act(*tensors, None, EPS, SLOPE, run=run)
    same_precision(result, reference(*tensors, None, EPS, SLOPE), oracle(tensors))


@pytest.mark.parametrize("frames", [64, STREAM_FRAMES + 64])
def test_a_constant_row_has_no_variance(frames, device, run):
    tensors = case(1, 2, frames, snake=True, device=device)
    tensors[0].fill_(7.0)
    result = adain_act(*tensors, None, EPS, SLOPE, run=run)
    torch.testing.assert_close(result.double(), oracle(tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e6])
def test_snake_far_from_the_origin(scale, device, run):
    """alpha · y up to about 1e6: the absolute error of the sine squared, over alpha."""
    tensors = case(1, 2, 256, snake=True, device=device)
    tensors[4] = torch.full((1, 2, 1), scale, device=device)
    tensors[1].zero_()
    result = adain_act(*tensors, None, EPS, SLOPE, run=run)
    y = reference(*tensors[:4], None, None, EPS, 1.0)  # fp32: the argument that the sine really sees
    eager = reference(*tensors, None, EPS, SLOPE)
    argument_error = (y.abs().max() * 2**-22 * scale).item()  # an ulp of y, through the sine
    assert (result - eager).abs().max().item() <= (5e-7 + argument_error) / scale + 2**-21 * y.abs().max().item()


@pytest.mark.parametrize(
    ("x", "style", "alpha"), list(itertools.product([torch.float16, torch.bfloat16, torch.float32], repeat=3))
)
def test_half_types_promote_as_eager_does(x, style, alpha, device, run, same_precision):
    if x == style == alpha or {x, style, alpha} == {torch.float16, torch.bfloat16}:
        tensors = case(1, 3, 100, snake=True, device=device)
        tensors = [value.to(dtype) for value, dtype in zip(tensors, (x, style, x, x, alpha), strict=True)]
        eager = reference(*tensors, None, EPS, SLOPE)
        result = adain_act(*tensors, None, EPS, SLOPE, run=run)
        assert result.dtype == eager.dtype
        same_precision(result, eager, oracle(tensors))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("layout", ["transposed", "every other frame", "expanded rows"])
def test_any_strides(layout, affine, device, run, same_precision):
    tensors = case(2, 4, 40, snake=True, device=device, affine=affine)
    if layout == "transposed":
        tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "every other frame":
        tensors[0] = torch.randn(2, 4, 80, device=device)[:, :, ::2]
    else:
        tensors[0] = torch.randn(1, 4, 40, device=device).expand(2, 4, 40)
    tensors[1] = torch.randn(2, 30, device=device)[:, 5:13]
    result = adain_act(*tensors, None, EPS, SLOPE, run=run)
    same_precision(result, reference(*tensors, None, EPS, SLOPE), oracle(tensors))


@pytest.mark.parametrize("shape", [(0, 4, 20), (2, 4, 0), (2, 0, 20)])
def test_zero_sizes_return_at_once(shape, device, run):
    rows, channels, frames = shape
    tensors = case(rows, channels, frames, snake=True, device=device)
    assert adain_act(*tensors, None, EPS, SLOPE, run=run).shape == shape


def test_one_frame_is_left_to_upstream_which_refuses_it(device, run):
    tensors = case(1, 2, 1, snake=True, device=device)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        adain_act(*tensors, None, EPS, SLOPE, run=run)
    assert list(TALLIES.of(run.receipt).fallbacks) == ["a single frame has no variance: upstream refuses it too"]


def test_outside_the_envelope_the_reference_runs_and_is_counted(device, run):
    tensors = in_fp64(case(1, 2, 50, snake=True, device=device))
    assert torch.equal(adain_act(*tensors, None, EPS, SLOPE, run=run), oracle(tensors))
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "torch.float64" in reason and TALLIES.of(run.receipt).calls == 0


@pytest.mark.parametrize("position", [0, 1, 2, 4])
def test_wrong_shapes_are_named(position, device, run):
    tensors = case(2, 4, 50, snake=True, device=device)
    tensors[position] = tensors[position][..., :1, :1] if position == 4 else tensors[position][..., :3]
    reason = adain_act.unsupported(*tensors, None, EPS, SLOPE)
    assert (reason is None) == (position == 0)  # fewer frames are only another length
    if position:
        assert any(name in reason for name in ("style", "weight, bias and alpha"))
