"""Mean, LeakyReLU and the zero tail, against the eager chain."""

import pytest
import torch
import torch.nn.functional as F

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.mean_act import BLOCK, mean_act, reference, unsupported


def tensors(count, shape, device, dtype=torch.float32):
    made = [torch.randn(shape, device=device).to(dtype) for _ in range(count)]
    return [*made, *[None] * (3 - count)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("frames", [1, 17, BLOCK, BLOCK + 1])
def test_fp32_has_the_bits_of_the_eager_chain(run, device, poisoned_empty, count, frames):
    a, b, c = tensors(count, (2, 3, frames), device)
    total = a if b is None else a + b if c is None else a + b + c
    # GPU eager multiplies by the reciprocal of a Python number; a CPU divides.
    expected = F.leaky_relu(total * torch.tensor(1 / count, device=device), 0.1)
    torch.testing.assert_close(mean_act(a, b, c, None, float(count), 0.1, run=run), expected, rtol=0, atol=0)
    assert not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(run, device, poisoned_empty, same_precision, dtype):
    given = tensors(3, (2, 3, 500), device, dtype)
    oracle = reference(*(t.double() for t in given), None, 3.0, 0.1)
    result = mean_act(*given, None, 3.0, 0.1, run=run)
    assert result.dtype == dtype
    same_precision(result, reference(*given, None, 3.0, 0.1), oracle)


def test_tail_is_zero_whatever_it_held(run, device, poisoned_empty):
    a, b, c = tensors(3, (4, 2, 2000), device)
    lengths = torch.tensor([2000, 1, 1500, 0], device=device)
    tail = torch.arange(2000, device=device) >= lengths.view(-1, 1, 1)
    dirty = [t.masked_fill(tail, float("nan")) for t in (a, b, c)]
    expected = F.leaky_relu((a + b + c) / 3, 0.01).masked_fill(tail, 0.0)
    for result in (mean_act(*dirty, lengths, 3.0, 0.01, run=run), reference(*dirty, lengths, 3.0, 0.01)):
        torch.testing.assert_close(result, expected)
        assert torch.all(result[tail.expand_as(result)] == 0)


@pytest.mark.parametrize("lengths", [None, [700, 3]])
def test_channels_last_stays_channels_last(run, device, poisoned_empty, lengths):
    a, b, _ = (None if t is None else t.transpose(1, 2) for t in tensors(2, (2, 700, 5), device))
    lengths = None if lengths is None else torch.tensor(lengths, device=device)
    result = mean_act(a, b, None, lengths, 2.0, 0.2, run=run)
    assert result.stride() == a.stride()
    torch.testing.assert_close(result, reference(a, b, None, lengths, 2.0, 0.2))
    assert not TALLIES.of(run.receipt).fallbacks


def test_slope_one_only_masks_and_the_result_is_new(run, device):
    a = torch.randn(1, 2, 9, device=device)
    for result in (mean_act(a, None, None, None, 1.0, 1.0, run=run), reference(a, None, None, None, 1.0, 1.0)):
        assert torch.equal(result, a) and result.data_ptr() != a.data_ptr()


def test_envelope():
    a = torch.zeros(2, 3, 4)
    assert unsupported(a, a, None, None, 2.0, 0.1) is None
    assert "float64" in unsupported(a.double(), None, None, None, 1.0, 0.1)
    assert "alike" in unsupported(a, a[:1], None, None, 2.0, 0.1)
    assert "without b" in unsupported(a, None, a, None, 2.0, 0.1)
    assert "lengths" in unsupported(a, None, None, torch.zeros(3), 1.0, 0.1)
    assert "all channels last" in unsupported(a, a.transpose(1, 2).contiguous().transpose(1, 2), None, None, 2.0, 0.1)
    assert "all channels last" in unsupported(a[:, :, ::2], None, None, None, 1.0, 0.1)
    assert "2^31" in unsupported(torch.empty(1, 2**16, 2**15, device="meta"), None, None, None, 1.0, 0.1)
    assert mean_act(torch.zeros(0, 3, 4), None, None, None, 1.0, 0.1, run=Run("interpreter", "empty")).shape == (
        0,
        3,
        4,
    )
