"""The short-time transform as magnitude and phase against torch.stft in fp64."""

import math

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.stft import BLOCK_FRAMES, complex_reference, reference, stft_complex, stft_polar

N_FFT, HOP = 20, 5
PI = torch.tensor(math.pi, dtype=torch.float32).item()


def case(rows, samples, device, n_fft=N_FFT):
    """Harmonics and noise, as a source gives them: weak bins beside strong ones."""
    t = torch.arange(samples)
    x = 0.1 * torch.sin(t * 0.07 * torch.arange(1, rows + 1).unsqueeze(1)) + 0.003 * torch.randn(rows, samples)
    return x.to(device), torch.hann_window(n_fft).to(device)


def assert_same(result, x, window, hop, same_precision):
    """Magnitude, complex value, and the phase itself where the magnitude is well above rounding."""
    eager, oracle = reference(x, window, None, hop), reference(x.double(), window.double(), None, hop)
    assert result.shape == eager.shape and result.dtype == eager.dtype
    parts = [value.chunk(2, dim=1) for value in (result, eager, oracle)]
    same_precision(*(magnitude for magnitude, _ in parts))
    same_precision(*(torch.view_as_real(torch.polar(m.double(), p.double())).to(m.dtype) for m, p in parts))
    clear = parts[2][0] > 1e-5
    same_precision(*(phase[clear] for _, phase in parts))


@pytest.mark.parametrize(
    ("rows", "samples", "n_fft", "hop"),
    [(3, 11, 20, 5), (2, 12, 20, 5), (1, 34, 20, 5), (1, 5 * BLOCK_FRAMES - 1, 20, 5), (1, 5 * BLOCK_FRAMES, 20, 5),
     (2, 9, 16, 4), (1, 301, 16, 4), (1, 60, 8, 2), (1, 60, 32, 8), (1, 60, 20, 10)],
)  # fmt: skip
def test_same_precision_as_upstream(rows, samples, n_fft, hop, device, run, same_precision, poisoned_empty):
    x, window = case(rows, samples, device, n_fft)
    assert_same(stft_polar(x, window, None, hop, run=run), x, window, hop, same_precision)
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_each_row_equals_itself_alone_at_its_valid_length(device, run, same_precision, poisoned_empty):
    lengths = [200, 199, 101, 12, 11, 10, 1, 0]
    x, window = case(len(lengths), 200, device)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    result = stft_polar(x, window, torch.tensor(lengths, device=device), HOP, run=run)
    for row, length in enumerate(lengths):
        frames = length // HOP + 1 if length > N_FFT // 2 else 0
        assert torch.all(result[row, :, frames:] == 0), "the tail behind a row's valid length is not zero"
        if frames:
            alone = x[row : row + 1, :length].clone()
            assert torch.equal(result[row : row + 1, :, :frames], stft_polar(alone, window, None, HOP, run=run))
            assert_same(result[row : row + 1, :, :frames], alone, window, HOP, same_precision)


def test_lengths_in_int32_and_the_reference_agree(device, run):
    x, window = case(3, 60, device)
    lengths = torch.tensor([60, 31, 4], device=device)
    wide = stft_polar(x, window, lengths, HOP, run=run)
    assert torch.equal(stft_polar(x, window, lengths.int(), HOP, run=run), wide)
    torch.testing.assert_close(wide[:, :11], reference(x, window, lengths, HOP)[:, :11], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", ["every other sample", "transposed", "expanded rows"])
def test_any_strides(layout, device, run, same_precision):
    x, window = case(2, 80, device)
    if layout == "every other sample":
        x = x[:, ::2]
    else:
        x = x.t().contiguous().t() if layout == "transposed" else x[:1].expand(2, 80)
    assert_same(stft_polar(x, window, None, HOP, run=run), x, window, HOP, same_precision)


def test_real_bins_have_phase_zero_or_plus_pi(device, run):
    x, window = case(2, 300, device)
    result, eager = stft_polar(x, window, None, HOP, run=run), reference(x, window, None, HOP)
    for bin_ in (11, 21):  # DC and Nyquist
        assert set(result[:, bin_].unique().tolist()) == {0.0, PI}
        assert torch.equal(result[:, bin_], eager[:, bin_])


def test_the_mirrored_first_frame_has_upstreams_signs(device, run):
    """Its imaginary parts are 1e-8 of the window's asymmetry: fp32 sums lose their sign, and 2 pi with it."""
    x, window = case(6, 25, device)
    phase = stft_polar(x, window, None, HOP, run=run)[:, 11:, 0]
    oracle = reference(x.double(), window.double(), None, HOP)[:, 11:, 0]
    assert (phase < -3).any() and (phase > 3).any()
    assert (phase - oracle).abs().max() < 1e-6
    symmetric = torch.ones_like(window)
    symmetric[0] = 0  # sample 0 has no twin
    phase = stft_polar(x, symmetric, None, HOP, run=run)[:, 11:, 0]
    assert set(phase.unique().tolist()) == {0.0, PI}


def test_silence_has_magnitude_and_phase_zero(device, run):
    x, window = torch.zeros(1, 50, device=device), torch.hann_window(N_FFT).to(device)
    assert torch.equal(stft_polar(x, window, None, HOP, run=run), torch.zeros(1, 22, 11, device=device))
    assert torch.equal(stft_polar(-x, window, None, HOP, run=run), torch.zeros(1, 22, 11, device=device))


def test_not_a_number_stays_where_it_is(device, run):
    x, window = case(1, 100, device)
    x[0, 50] = torch.nan
    expected = reference(x, window, None, HOP).isnan()
    magnitude = stft_polar(x, window, None, HOP, run=run).isnan()[:, :11]
    assert torch.equal(magnitude, expected[:, :11]) and magnitude.any()


def test_no_rows(device, run):
    window = torch.hann_window(N_FFT).to(device)
    assert stft_polar(torch.empty(0, 50, device=device), window, None, HOP, run=run).shape == (0, 22, 11)


def test_too_short_a_row_is_left_to_upstream_which_refuses_it(device, run):
    x, window = case(1, 10, device)
    with pytest.raises(RuntimeError, match="adding size"):
        stft_polar(x, window, None, HOP, run=run)
    assert "reflection needs more than n_fft / 2" in next(iter(TALLIES.of(run.receipt).fallbacks))


@pytest.mark.parametrize(
    ("dtype", "n_fft", "hop", "reason"),
    [(torch.float64, 20, 5, "x must be fp32"), (torch.float32, 64, 16, "at most 32"), (torch.float32, 20, 7, "hop")],
)
def test_outside_the_envelope_the_reference_runs_and_is_counted(dtype, n_fft, hop, reason, device, run):
    x, window = case(1, 200, device, n_fft)
    x, window = x.to(dtype), window.to(dtype)
    assert torch.equal(stft_polar(x, window, None, hop, run=run), reference(x, window, None, hop))
    (found,) = TALLIES.of(run.receipt).fallbacks
    assert reason in found and TALLIES.of(run.receipt).calls == 0


@pytest.mark.parametrize(("rows", "samples", "n_fft", "hop"), [(2, 9, 16, 4), (2, 480, 16, 4), (1, 34, 20, 5)])
def test_real_and_imaginary_parts(rows, samples, n_fft, hop, device, run, same_precision, poisoned_empty):
    x, window = case(rows, samples, device, n_fft)
    frames, wide, parts = samples // hop + 1, BLOCK_FRAMES + 40, n_fft + 2
    eager, spectrum = (
        torch.stft(values, n_fft, hop, n_fft, window=window.to(values.dtype), return_complex=True)
        for values in (x, x.double())
    )
    eager, oracle = (torch.cat([value.real, value.imag], dim=1).transpose(1, 2) for value in (eager, spectrum))
    for room in ((0, frames, parts), (0, frames + 3, parts + 6), (14, frames + wide, parts + 1)):
        result = stft_complex(x, window, None, hop, *room, run=run)
        assert result.shape == (rows, *room[1:]) and result.is_contiguous()
        inner = result[:, room[0] : room[0] + frames, :parts]
        same_precision(inner, eager, oracle)
        assert result.count_nonzero() == inner.count_nonzero(), "what lies around is not zero"
    assert TALLIES.of(run.receipt).calls == 3 and not TALLIES.of(run.receipt).fallbacks


def test_parts_of_each_row_equal_those_of_the_row_alone(device, run, poisoned_empty):
    lengths = [64, 61, 9, 8, 0]
    x, window = case(len(lengths), 64, device, 16)
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    given = torch.tensor(lengths, device=device)
    result = stft_complex(x, window, given, 4, 3, 24, 24, run=run)
    torch.testing.assert_close(result, complex_reference(x, window, given, 4, 3, 24, 24), rtol=1e-5, atol=1e-7)
    for row, length in enumerate(lengths):
        frames = length // 4 + 1 if length > 8 else 0
        assert torch.all(result[row, :3] == 0) and torch.all(result[row, 3 + frames :] == 0)
        if frames:
            alone = stft_complex(x[row : row + 1, :length].clone(), window, None, 4, 0, frames, 24, run=run)
            assert torch.equal(result[row : row + 1, 3 : 3 + frames], alone)


@pytest.mark.parametrize("room", [(-1, 30, 22), (0, 10, 22), (5, 15, 22), (0, 11, 21), (0, 11, 33)])
def test_parts_without_room_are_refused(room, device):
    x, window = case(1, 50, device)
    assert "expected room for 11 frames and 22 to 32 channels" in stft_complex.unsupported(x, window, None, HOP, *room)
