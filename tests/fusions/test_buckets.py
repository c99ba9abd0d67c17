"""Buckets: their waste, their bounds, and the length that tensors share."""

import pytest
import torch

from voxfuse.fusions.buckets import Buckets, Length, common_length, part, shape

ASR, CURVE, STYLE = (512, Length(1)), (Length(2),), (128,)


def test_every_length_fits_its_bucket_with_little_waste():
    buckets = Buckets()
    for length in range(1, 2049):
        bucket = buckets.of(length)
        assert bucket >= length and buckets.of(bucket) == bucket
        assert bucket - length < (8 if length <= 64 else length / 8)
    assert len({buckets.of(length) for length in range(1, 2049)}) == 48
    assert [buckets.of(length) for length in (1, 8, 9, 64, 65, 400, 1025, 2048)] == [8, 8, 16, 64, 72, 416, 1152, 2048]


def test_what_has_no_bucket():
    buckets = Buckets(shortest=2)
    assert buckets.refusal(1, 2) is buckets.refusal(8, 2048) is None
    assert "9 rows" in buckets.refusal(9, 100)
    assert "outside 2 to 2048" in buckets.refusal(1, 1) and "outside" in buckets.refusal(1, 2049)


def test_shapes_and_parts():
    assert shape(3, ASR, 10) == (3, 512, 10) and shape(3, CURVE, 10) == (3, 20) and shape(3, STYLE, 10) == (3, 128)
    curve, style = torch.arange(16.0).view(1, 16), torch.zeros(1, 128)
    assert part(curve, CURVE, 1, 3).tolist() == [[2, 3, 4, 5]]
    assert part(style, STYLE, 1, 3) is style


def test_common_length():
    asr, curve, style = torch.zeros(2, 512, 7), torch.zeros(2, 14), torch.zeros(2, 128)
    axes = (ASR, CURVE, STYLE)
    assert common_length((asr, curve, style), axes) == 7
    with pytest.raises(ValueError, match=r"expected \[2, 14\].*got \[2, 13\]"):
        common_length((asr, curve[:, :13], style), axes)
    with pytest.raises(ValueError, match=r"expected \[2, 128\].*got \[1, 128\]"):
        common_length((asr, curve, style[:1]), axes)
    with pytest.raises(ValueError, match=r"expected torch\.float32.*got torch\.float64"):
        common_length((asr, curve.double(), style), axes)
    with pytest.raises(ValueError, match="expected 3 tensors, got 2"):
        common_length((asr, curve), axes)
