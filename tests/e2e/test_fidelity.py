"""Fidelity figures against signals whose figures are known."""

import hashlib
import struct

import numpy as np
import pytest

from voxfuse.e2e.fidelity import audio_sha256, compare, log_spectrum_l1, snr_db

RATE_HZ = 24_000
TONE = np.sin(2 * np.pi * 440 * np.arange(RATE_HZ) / RATE_HZ).astype(np.float32)
NOISE = np.random.default_rng(0).standard_normal(RATE_HZ).astype(np.float32)


def test_hash_is_of_little_endian_float32():
    expected = hashlib.sha256(struct.pack("<3f", 0.0, 0.5, -1.0)).hexdigest()
    assert audio_sha256(np.array([0.0, 0.5, -1.0])) == expected


@pytest.mark.parametrize("noise_db", [-20, -60, -100])
def test_snr_of_noise_of_known_power(noise_db):
    noise = NOISE / np.sqrt(np.mean(NOISE**2)) * np.sqrt(0.5) * 10 ** (noise_db / 20)
    patched = TONE.astype(np.float64) + noise
    assert snr_db(TONE, patched) == pytest.approx(-noise_db, abs=0.05)


def test_gain_moves_the_log_spectrum_by_its_logarithm():
    assert log_spectrum_l1(NOISE, NOISE * np.float32(np.e**0.25)) == pytest.approx(0.25, rel=1e-3)


def test_phase_moves_snr_but_not_the_log_spectrum():
    shifted = np.sin(2 * np.pi * 440 * np.arange(RATE_HZ) / RATE_HZ + 0.5).astype(np.float32)
    assert snr_db(TONE, shifted) < 10
    assert log_spectrum_l1(TONE, shifted) < 0.02


def test_inaudible_change_in_silence_does_not_count():
    baseline = np.concatenate([TONE, np.zeros(RATE_HZ, np.float32)])
    patched = baseline.copy()
    patched[RATE_HZ + 1024 :] += 1e-7
    assert log_spectrum_l1(baseline, patched) == 0


def test_identical_samples_are_not_measured():
    assert compare(TONE, TONE.copy()) == (True, None, None, None)


def test_one_changed_sample_is_not_identical():
    patched = TONE.copy()
    patched[100] += 1e-6
    result = compare(TONE, patched)
    assert not result.identical and result.snr_db is not None and 100 < result.snr_db < 200


def test_other_length_and_nan_cannot_be_compared():
    assert "100 samples against 24000" in compare(TONE, TONE[:100]).reason
    broken = TONE.copy()
    broken[5] = np.nan
    assert compare(TONE, broken).reason == "samples are not finite"


@pytest.mark.parametrize("length", [1, 600, 1024])
def test_silence_and_short_audio_give_finite_figures(length):
    silence, click = np.zeros(length, np.float32), np.full(length, 0.5, np.float32)
    assert snr_db(silence, click) == -200
    assert snr_db(click, silence) == pytest.approx(0)
    assert log_spectrum_l1(silence, silence) == 0
    assert np.isfinite(log_spectrum_l1(silence, click))
