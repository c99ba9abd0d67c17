"""The inverse short-time transform of magnitude and phase against torch.istft in fp64."""

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.istft import BLOCK_HOPS, istft_limited, istft_polar, limited_reference, reference
from voxfuse.kernels.stft import stft_polar

N_FFT, HOP, BINS = 20, 5, 11


def case(rows, frames, head, device, n_fft=N_FFT):
    """Log-magnitudes (magnitudes for polar) and phases, each a slice of one tensor as a convolution leaves them."""
    bins = n_fft // 2 + 1
    x = torch.randn(rows, 2 * bins, frames, device=device)
    a, b = x[:, :bins] * 1.5 - 2.0, x[:, bins:] * 2.0
    return (a.exp() if head == "polar" else a), b, torch.hann_window(n_fft).to(device)


def oracle(a, b, window, hop, head):
    return reference(a.double(), b.double(), window.double(), None, hop, head)


@pytest.mark.parametrize(
    ("rows", "frames", "n_fft", "hop", "head"),
    [(3, 2, 20, 5, "polar"), (2, 3, 20, 5, "exp_sin"), (2, 4, 20, 5, "polar"), (1, BLOCK_HOPS + 1, 20, 5, "exp_sin"),
     (1, BLOCK_HOPS + 2, 20, 5, "polar"), (2, 30, 16, 4, "exp_sin"), (1, 30, 8, 2, "polar"), (1, 30, 20, 10, "polar")],
)  # fmt: skip
def test_same_precision_as_upstream(rows, frames, n_fft, hop, head, device, run, same_precision, poisoned_empty):
    a, b, window = case(rows, frames, head, device, n_fft)
    result = istft_polar(a, b, window, None, hop, head, run=run)
    same_precision(result, reference(a, b, window, None, hop, head), oracle(a, b, window, hop, head))
    assert result.shape == (rows, (frames - 1) * hop)
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_each_row_equals_itself_alone_at_its_valid_length(device, run, same_precision, poisoned_empty):
    lengths = [40, 39, 17, 3, 2, 1, 0]
    a, b, window = case(len(lengths), 40, "exp_sin", device)
    for row, length in enumerate(lengths):
        a[row, :, length:] = b[row, :, length:] = torch.nan
    result = istft_polar(a, b, window, torch.tensor(lengths, device=device), HOP, "exp_sin", run=run)
    for row, length in enumerate(lengths):
        samples = max(length - 1, 0) * HOP
        assert torch.all(result[row, samples:] == 0), "the tail behind a row's valid length is not zero"
        if samples and length != 17:
            one = [value[row : row + 1, :, :length].clone() for value in (a, b)]
            found = result[row : row + 1, :samples]
            assert torch.equal(found, istft_polar(*one, window, None, HOP, "exp_sin", run=run))
            same_precision(found, reference(*one, window, None, HOP, "exp_sin"), oracle(*one, window, HOP, "exp_sin"))


def test_lengths_in_int32_and_the_reference_agree(device, run):
    a, b, window = case(3, 12, "polar", device)
    lengths = torch.tensor([12, 5, 1], device=device)
    wide = istft_polar(a, b, window, lengths, HOP, "polar", run=run)
    assert torch.equal(istft_polar(a, b, window, lengths.int(), HOP, "polar", run=run), wide)
    torch.testing.assert_close(wide, reference(a, b, window, lengths, HOP, "polar"), rtol=1e-5, atol=1e-6)


def test_any_strides(device, run, same_precision):
    a, b, window = case(2, 16, "exp_sin", device)
    a, b = a.transpose(1, 2).contiguous().transpose(1, 2), b[:1].expand(2, BINS, 16)
    a, b = a[:, :, ::2], b[:, :, 1::2]
    result = istft_polar(a, b, window, None, HOP, "exp_sin", run=run)
    same_precision(result, reference(a, b, window, None, HOP, "exp_sin"), oracle(a, b, window, HOP, "exp_sin"))


def test_phases_many_turns_away(device, run, same_precision):
    a, b, window = case(1, 40, "polar", device)
    b = b * 300
    result = istft_polar(a, b, window, None, HOP, "polar", run=run)
    same_precision(result, reference(a, b, window, None, HOP, "polar"), oracle(a, b, window, HOP, "polar"))


def test_what_was_taken_apart_comes_back(device, run):
    window = torch.hann_window(N_FFT).to(device)
    x = torch.randn(2, 100, device=device)
    magnitude, phase = stft_polar(x, window, None, HOP, run=run).chunk(2, dim=1)
    assert (istft_polar(magnitude, phase, window, None, HOP, "polar", run=run) - x).abs().max() < 3e-6


def test_an_unknown_head_is_refused(device, run):
    a, b, window = case(1, 5, "polar", device)
    for backend in (run.backend, "reference"):
        with pytest.raises(ValueError, match="head must be one of polar, exp_sin, got 'log'"):
            istft_polar(a, b, window, None, HOP, "log", run=run._replace(backend=backend))


def test_one_frame_is_left_to_upstream_which_refuses_it(device, run):
    a, b, window = case(1, 1, "polar", device)
    with pytest.raises(RuntimeError):
        istft_polar(a, b, window, None, HOP, "polar", run=run)
    assert "fewer than two frames" in next(iter(TALLIES.of(run.receipt).fallbacks))


def test_no_rows(device, run):
    a, b, window = case(0, 5, "polar", device)
    assert istft_polar(a, b, window, None, HOP, "polar", run=run).shape == (0, 20)


def test_outside_the_envelope_the_reference_runs_and_is_counted(device, run):
    a, b, window = case(1, 9, "polar", device, 64)
    assert torch.equal(
        istft_polar(a, b, window, None, 16, "polar", run=run), reference(a, b, window, None, 16, "polar")
    )
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "at most 32" in reason and TALLIES.of(run.receipt).calls == 0


@pytest.mark.parametrize(("frames", "n_fft", "hop"), [(2, 16, 4), (121, 16, 4), (30, 20, 5)])
def test_limits_on_magnitude_and_samples(frames, n_fft, hop, device, run, same_precision, poisoned_empty):
    a, b, window = case(2, frames, "exp_sin", device, n_fft)
    a = a * 2 + 3  # a few magnitudes above the limit, many samples too
    limits = 100.0, 0.99
    result = istft_limited(a, b, window, None, hop, *limits, run=run)
    magnitude = a.double().exp().clip(max=limits[0])
    spectrum = torch.polar(magnitude, b.double().sin())
    whole = torch.istft(spectrum, n_fft, hop, n_fft, window=window.double())
    assert torch.any(a.exp() > limits[0]) and torch.any(whole.abs() > limits[1])
    same_precision(result, limited_reference(a, b, window, None, hop, *limits), whole.clamp(-limits[1], limits[1]))
    assert result.abs().max() == torch.tensor(limits[1], dtype=torch.float32)
    wide = istft_limited(a, b, window, None, hop, limits[0], 1e9, run=run)
    same_precision(wide, limited_reference(a, b, window, None, hop, limits[0], 1e9), whole)
    assert TALLIES.of(run.receipt).calls == 2 and not TALLIES.of(run.receipt).fallbacks


def test_limits_keep_nan_and_lengths(device, run, poisoned_empty):
    a, b, window = case(3, 12, "exp_sin", device, 16)
    a[0, 2, 5] = torch.nan
    lengths = torch.tensor([12, 7, 1], device=device)
    a[1, :, 7:] = torch.nan
    result = istft_limited(a, b, window, lengths, 4, 100.0, 0.99, run=run)
    assert torch.any(torch.isnan(result[0])), "NaN must stay visible"
    torch.testing.assert_close(result[1:], limited_reference(a, b, window, lengths, 4, 100.0, 0.99)[1:])
    assert torch.all(result[1, 24:] == 0) and torch.all(result[2] == 0)
