"""The convolution with its neighbours against torch's dilated one in fp64, and weights folded and packed."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.kernels._conv_plan import Plan
from voxfuse.kernels._op import TALLIES
from voxfuse.kernels._phases import from_phases, to_phases
from voxfuse.kernels.conv1d import STRATEGIES, conv1d, conv_unsupported, grouped, packed_weight
from voxfuse.kernels.moments import moments_reference


def case(rows, frames, channels, taps, device, out=None, dtype=torch.float32):
    """x in plain order, weight, bias, residual."""
    out = channels if out is None else out
    x = torch.randn(rows, frames, channels)
    values = x, torch.randn(out, taps, channels) * 0.2, torch.randn(out), torch.randn(rows, frames, out)
    return [value.to(device, dtype) for value in values]


def fused(tensors, lengths, dilation, plan, run):
    """y in plain order, and its moments."""
    x, weight, bias, residual = tensors
    frames, taps = x.shape[1], weight.shape[1]
    laid = to_phases(x, *plan.layout(taps, taps // 2, dilation, frames))
    packed = grouped(weight, plan.together)
    y, known = conv1d(laid, packed, bias, residual, lengths, frames, dilation, taps, *plan, run=run)
    return (from_phases(y, frames, dilation) if bias is None and residual is None else y), known


def upstream(x, weight, bias, residual, dilation):
    """conv(x) + residual as torch computes it, channels last."""
    padding = dilation * (weight.shape[1] - 1) // 2
    y = F.conv1d(x.transpose(1, 2), weight.transpose(1, 2), bias, padding=padding, dilation=dilation)
    return y.transpose(1, 2) if residual is None else y.transpose(1, 2) + residual


def close(value, eager, oracle):
    """At most 1.25 times eager's error, or what another order of up to 88 products costs in fp32."""
    error, bound = ((other.double() - oracle).norm() / oracle.norm() for other in (value, eager))
    assert error <= max(1.25 * bound, 2**-22), f"relative RMS error {error:.2e}, eager {bound:.2e}"


def in_fp64(tensors):
    return [None if value is None else value.double() for value in tensors]


@pytest.fixture(params=[Plan(axis, together) for axis in STRATEGIES for together in (1, 2, 4)], ids=str)
def plan(request):
    return request.param


@pytest.mark.parametrize(("taps", "dilation"), list(itertools.product([1, 3, 7, 11], [1, 3, 5])))
def test_frames_that_the_dilation_does_not_divide(taps, dilation, plan, device, run):
    for frames in (1, 2, 4, 5, 13, 20, 61):
        tensors = case(2, frames, 8, taps, device, out=12)
        y, known = fused(tensors, None, dilation, plan, run)
        close(y, upstream(*tensors, dilation), upstream(*in_fp64(tensors), dilation))
        torch.testing.assert_close(known, moments_reference(y, None, frames, 1), rtol=1e-4, atol=1e-4)
    assert TALLIES.of(run.receipt).calls == 7 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("terms", ["neither", "bias", "residual"])
def test_without_bias_or_residual(terms, plan, device, run):
    x, weight, bias, residual = case(2, 31, 8, 3, device)
    tensors = [x, weight, bias if terms == "bias" else None, residual if terms == "residual" else None]
    y, known = fused(tensors, None, 3, plan, run)
    close(y, upstream(*tensors, 3), upstream(*in_fp64(tensors), 3))
    torch.testing.assert_close(known, moments_reference(y, None, 31, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bare", [True, False])
def test_each_row_equals_itself_alone_at_its_length(bare, plan, device, run):
    lengths = [40, 23, 1, 0]
    x, weight, bias, residual = case(4, 40, 8, 7, device)
    bias, residual = (None, None) if bare else (bias, residual)
    for row, length in enumerate(lengths):
        x[row, length:] = 0
    y, known = fused((x, weight, bias, residual), torch.tensor(lengths, device=device), 5, plan, run)
    for row, length in enumerate(lengths[:3]):
        part = slice(row, row + 1)
        alone = upstream(x[part, :length], weight, bias, None if bare else residual[part, :length], 5)
        torch.testing.assert_close(y[part, :length], alone, rtol=1e-4, atol=1e-5)
        expected = moments_reference(F.pad(alone, (0, 0, 0, 40 - length)), torch.tensor([length], device=device), 40, 1)
        torch.testing.assert_close(known[part], expected, rtol=1e-4, atol=1e-4)
        assert bare or torch.all(y[row, length:] == 0)


@pytest.mark.parametrize("shape", [(0, 20, 4), (2, 0, 4)])
def test_zero_sizes_return_at_once(shape, plan, device, run):
    y, known = fused(case(*shape, 3, device), None, 1, plan, run)
    assert y.shape == shape and known.numel() == 0


def test_outside_the_envelope_the_reference_runs_and_is_counted(plan, device, run):
    tensors = in_fp64(case(2, 22, 4, 3, device))
    y, known = fused(tensors, None, 5, plan, run)
    torch.testing.assert_close(y, upstream(*tensors, 5))
    torch.testing.assert_close(known, moments_reference(y, None, 22, 1))
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "float64" in reason and TALLIES.of(run.receipt).calls == 0


def test_wrong_arguments_are_named(device):
    x, weight, bias, residual = case(2, 30, 4, 3, device)

    def reason(
        x=x, weight=weight, bias=bias, residual=residual, taps=3, together=1, frames=30, dilation=5, axis="taps_last"
    ):
        return conv1d.unsupported(x, weight, bias, residual, None, frames, dilation, taps, axis, together)

    assert reason() is None
    assert "[rows, 32, channels]" in reason(dilation=4)
    assert "[1 · out, 3, 4]" in reason(weight=weight[:, :2].contiguous())
    assert "odd taps" in reason(taps=4) and "one frame" in reason(together=0)
    assert "[rows, 40, channels]" in reason(together=2)
    assert "[2 · out, 2, 8]" in reason(x=torch.cat([x, x], 1)[:, :40].contiguous(), together=2)
    assert "residual" in reason(residual=residual[:, :29])
    assert "dtypes" in reason(weight=weight.half())
    with pytest.raises(KeyError, match="no conv1d strategy named 'magic'; known: taps_first, taps_last"):
        reason(axis="magic")


def normed(**changes):
    return nn.utils.weight_norm(nn.Conv1d(4, 6, 3, padding=1, **changes))


@torch.no_grad()
def test_a_weight_norm_hook_is_folded_as_it_computes_and_stays():
    conv = normed()
    conv.weight_g.uniform_(0.5, 2)
    packed = packed_weight(conv)
    x = torch.randn(1, 4, 9)
    expected = conv(x)  # the hook writes conv.weight
    assert torch.equal(packed, conv.weight.transpose(1, 2))
    assert packed_weight(conv) is packed, "packed again though nothing changed"
    assert len(conv._forward_pre_hooks) == 1 and torch.equal(conv(x), expected)
    assert set(conv.state_dict()) == {"bias", "weight_g", "weight_v"}


@torch.no_grad()
def test_a_changed_weight_is_packed_anew():
    conv, plain = normed(), nn.Conv1d(4, 6, 3, padding=1)
    assert torch.equal(packed_weight(plain), plain.weight.transpose(1, 2))
    packed_weight(conv)
    conv.weight_g.mul_(3)
    plain.load_state_dict(nn.Conv1d(4, 6, 3).state_dict())
    conv(torch.randn(1, 4, 9))
    for changed in (conv, plain):
        assert torch.equal(packed_weight(changed), changed.weight.transpose(1, 2))
    nn.utils.remove_weight_norm(conv)
    assert torch.equal(packed_weight(conv), conv.weight.transpose(1, 2))


def test_modules_that_are_not_plain_convolutions_are_refused_with_the_reason():
    assert conv_unsupported(normed()) is None and conv_unsupported(nn.Conv1d(2, 2, 5, padding=4, dilation=2)) is None
    assert "expected Conv1d" in conv_unsupported(nn.Linear(2, 2))
    for changes in ({"stride": 2}, {"groups": 2}, {"padding_mode": "reflect"}):
        assert "expected odd taps, stride 1" in conv_unsupported(normed(**changes))
    assert "odd taps" in conv_unsupported(nn.Conv1d(2, 2, 4))
    assert "keeps the length" in conv_unsupported(nn.Conv1d(2, 2, 3))
    hooked = normed()
    hooked.register_forward_hook(lambda *_: None)
    assert "hooks" in conv_unsupported(hooked)
    spectral = nn.Conv1d(2, 2, 3, padding=1)
    spectral.register_forward_pre_hook(lambda *_: None)
    assert "hooks" in conv_unsupported(spectral)
    own = normed()
    own.forward = lambda x: x
    assert "forward of its own" in conv_unsupported(own)
