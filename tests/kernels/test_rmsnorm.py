"""RMSNorm against the upstream classes in fp64: cast orders, strides, widths, residual."""

import pytest
import torch
from torch import nn

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.rmsnorm import ORDERS, RESIDENT_WIDTH, add_rms_norm, reference, rms_norm

EPS = 1e-6
TYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(shape, device, dtype=torch.float32, weight_dtype=None):
    """x at a level of its own in each row, weight around one."""
    x = torch.randn(shape) * torch.exp(torch.randn(*shape[:-1], 1))
    weight = 1 + 0.3 * torch.randn(shape[-1])
    return x.to(device, dtype), weight.to(device, weight_dtype or dtype)


def llama(x, weight):
    LlamaRMSNorm = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm

    norm = LlamaRMSNorm(x.shape[-1], eps=EPS).to(x.device)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm(x)


def gemma(x, weight):
    Gemma3RMSNorm = pytest.importorskip("transformers.models.gemma3.modeling_gemma3").Gemma3RMSNorm

    norm = Gemma3RMSNorm(x.shape[-1], eps=EPS).to(x.device)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm(x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("order", "upstream"), [("cast_then_scale", llama), ("one_plus", gemma)])
def test_the_reference_is_the_upstream_class(order, upstream, dtype, device):
    x, weight = case((3, 5, 96), device, dtype)
    assert torch.equal(reference(x, weight, EPS, order), upstream(x, weight))


def test_the_alpha_order_is_moshis(device):
    x, alpha = case((2, 4, 64), device, torch.bfloat16, torch.float32)
    variance = EPS + torch.mean(x.float() ** 2, dim=2, keepdim=True)
    expected = (x.float() * (alpha.to(variance) * torch.rsqrt(variance))).to(x.dtype)
    assert torch.equal(reference(x, alpha, EPS, "alpha"), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 896), (2, 3, 64), (7, 1), (5, 80), (1, 72), (3, RESIDENT_WIDTH + 5)])
def test_same_precision_as_upstream(shape, dtype, order, device, run, same_precision, poisoned_empty):
    x, weight = case(shape, device, dtype)
    result = rms_norm(x, weight, EPS, order, run=run)
    eager = reference(x, weight, EPS, order)
    assert result.dtype == eager.dtype and result.shape == eager.shape
    same_precision(result, eager, reference(x.double(), weight.double(), EPS, order))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_roundings_are_eagers_bit_for_bit_where_the_sum_is_exact(order, dtype, device, run):
    """Elements of ±1 and ±2 in equal numbers: the mean of squares is exact in any order of summation."""
    x = torch.tensor([1.0, -2.0, 2.0, -1.0], device=device).repeat(9, 64).to(dtype)
    weight = (1 + 0.3 * torch.randn(256)).to(device, dtype)
    assert torch.equal(rms_norm(x, weight, EPS, order, run=run), reference(x, weight, EPS, order))


@pytest.mark.parametrize("order", ORDERS)
def test_weights_of_another_type_promote_as_upstream_does(order, device, run, same_precision):
    x, weight = case((4, 128), device, torch.bfloat16, torch.float32)
    result = rms_norm(x, weight, EPS, order, run=run)
    eager = reference(x, weight, EPS, order)
    assert result.dtype == eager.dtype == (torch.float32 if order == "cast_then_scale" else torch.bfloat16)
    same_precision(result, eager, reference(x.double(), weight.double(), EPS, order))


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_rows_far_from_one(scale, device, run, same_precision):
    x, weight = case((4, 896), device, torch.bfloat16)
    x = x * scale
    result = rms_norm(x, weight, EPS, "cast_then_scale", run=run)
    oracle = reference(x.double(), weight.double(), EPS, "cast_then_scale")
    same_precision(result, reference(x, weight, EPS, "cast_then_scale"), oracle)


def test_a_row_of_zeros_stays_zero_and_nan_spreads_over_its_row_alone(device, run):
    x, weight = case((3, 64), device)
    x[0], x[1, 5] = 0, torch.nan
    result = rms_norm(x, weight, EPS, "cast_then_scale", run=run)
    assert torch.all(result[0] == 0) and torch.isnan(result[1]).all() and torch.isfinite(result[2]).all()


@pytest.mark.parametrize("layout", ["last token", "heads of a packed projection", "every other element", "expanded"])
def test_any_strides(layout, device, run, same_precision):
    if layout == "last token":
        x = torch.randn(3, 7, 64, device=device)[:, -1:]
    elif layout == "heads of a packed projection":
        x = torch.randn(2, 5, 4 * 32 + 64, device=device)[..., :128].view(2, 5, 4, 32)
    elif layout == "every other element":
        x = torch.randn(4, 128, device=device)[:, ::2]
    else:
        x = torch.randn(1, 64, device=device).expand(5, 64)
    weight = torch.rand(x.shape[-1], device=device) + 0.5
    result = rms_norm(x, weight, EPS, "cast_then_scale", run=run)
    oracle = reference(x.double(), weight.double(), EPS, "cast_then_scale")
    same_precision(result, reference(x, weight, EPS, "cast_then_scale"), oracle)
    assert not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [896, RESIDENT_WIDTH + 5])
def test_the_residual_sum_is_bitwise_and_the_norm_follows_it(width, dtype, device, run, same_precision, poisoned_empty):
    x, weight = case((2, 3, width), device, dtype)
    residual = torch.randn(2, 4, width).to(device, dtype)[:, 1:]
    y, total = add_rms_norm(x, residual, weight, EPS, "cast_then_scale", run=run)
    assert torch.equal(total, residual + x)
    oracle = reference(total.double(), weight.double(), EPS, "cast_then_scale")
    same_precision(y, reference(total, weight, EPS, "cast_then_scale"), oracle)
    assert not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_zero_sizes_return_at_once(shape, device, run):
    weight = torch.ones(64, device=device)
    assert rms_norm(torch.zeros(shape, device=device), weight, EPS, "alpha", run=run).shape == shape


def test_outside_the_envelope_the_reference_runs_and_is_counted(device, run):
    x, weight = case((2, 64), device)
    result = rms_norm(x.double(), weight.double(), EPS, "one_plus", run=run)
    assert torch.equal(result, reference(x.double(), weight.double(), EPS, "one_plus"))
    (reason,) = TALLIES.of(run.receipt).fallbacks
    assert "float64" in reason
    assert "order must be one of" in rms_norm.unsupported(x, weight, EPS, "last")
    assert "weight must be" in rms_norm.unsupported(x, weight[:3], EPS, "alpha")
    cube = torch.zeros(4, 4, 4, 8, device=device).permute(2, 1, 0, 3)
    assert "merge into two" in rms_norm.unsupported(cube, weight[:8], EPS, "alpha")
    assert "residual must be" in add_rms_norm.unsupported(x, x[:1], weight, EPS, "alpha")
    assert "merge alike" in add_rms_norm.unsupported(
        torch.zeros(4, 6, 2, 64), torch.zeros(4, 7, 2, 64)[:, 1:], weight, EPS, "alpha"
    )
