"""Products of a few rows against the upstream chain in fp64: norms, biases, residuals, SwiGLU, strides, row counts."""

import pytest
import torch
import torch.nn.functional as F

from voxfuse.kernels import rmsnorm
from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.skinny_gemm import (
    CLASSES,
    MAX_ROWS,
    reference,
    shape_class,
    skinny_linear,
    skinny_swiglu,
    swiglu_reference,
)

TYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-6


def drawn(*shape, dtype=torch.float32, device="cpu", scale=1.0):
    return (scale * torch.randn(shape, device=device)).to(dtype)


def in_fp64(x, weight, bias, residual, norm_weight, order="cast_then_scale"):
    """The formula, rounded nowhere."""
    x, weight = x.double(), weight.double()
    if norm_weight is not None:
        scale = 1.0 + norm_weight.double() if order == "one_plus" else norm_weight.double()
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale
    y = torch.einsum("...k,nk->...n", x, weight)
    y = y if bias is None else y + bias.double()
    return y if residual is None else residual.double() + y


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("neighbours", ["none", "bias", "residual", "norm", "all"])
def test_same_precision_as_upstream(neighbours, rows, dtype, device, run, same_precision, poisoned_empty):
    inputs, outputs = 136, 37
    x, weight = drawn(rows, 1, inputs, dtype=dtype, device=device), drawn(outputs, inputs, dtype=dtype, device=device)
    bias = drawn(outputs, dtype=dtype, device=device) if neighbours in ("bias", "all") else None
    residual = drawn(rows, 1, outputs, dtype=dtype, device=device) if neighbours in ("residual", "all") else None
    norm = 1 + drawn(inputs, dtype=dtype, device=device, scale=0.3) if neighbours in ("norm", "all") else None
    arguments = x, weight, bias, residual, norm
    y = skinny_linear(*arguments, EPS, "cast_then_scale", run=run)
    assert y.dtype == dtype and y.shape == (rows, 1, outputs) and y.is_contiguous()
    same_precision(y, reference(*arguments, EPS, "cast_then_scale"), in_fp64(*arguments))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [8, 300, 1024, 1100, 2100])
@pytest.mark.parametrize("normed", [False, True])
def test_widths_that_blocks_do_not_divide(inputs, normed, dtype, device, run, same_precision, poisoned_empty):
    x, weight = drawn(3, inputs, dtype=dtype, device=device), drawn(11, inputs, dtype=dtype, device=device)
    norm = 1 + drawn(inputs, dtype=dtype, device=device, scale=0.3) if normed else None
    y = skinny_linear(x, weight, None, None, norm, EPS, "cast_then_scale", run=run)
    eager = reference(x, weight, None, None, norm, EPS, "cast_then_scale")
    same_precision(y, eager, in_fp64(x, weight, None, None, norm))


@pytest.mark.parametrize("order", rmsnorm.ORDERS)
def test_orders_of_the_norm(order, device, run, same_precision):
    dtype = torch.bfloat16
    x, weight = drawn(4, 96, dtype=dtype, device=device, scale=3), drawn(24, 96, dtype=dtype, device=device)
    norm = drawn(96, dtype=dtype, device=device)
    y = skinny_linear(x, weight, None, None, norm, EPS, order, run=run)
    eager = reference(x, weight, None, None, norm, EPS, order)
    same_precision(y, eager, in_fp64(x, weight, None, None, norm, order))
    alike = {"alpha", "scale_then_cast"}  # which differ in the last bit of fp32 alone
    apart = set(rmsnorm.ORDERS) - (alike if order in alike else {order})
    others = [reference(x, weight, None, None, norm, EPS, other) for other in apart]
    assert all((y != eager).sum() < (y != other).sum() for other in others), "the data cannot tell the orders apart"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_product_is_rounded_before_the_residual(dtype, device, run):
    x, weight = drawn(8, 64, dtype=dtype, device=device), drawn(96, 64, dtype=dtype, device=device)
    residual = drawn(8, 96, dtype=dtype, device=device, scale=8)
    y = skinny_linear(x, weight, None, residual, None, EPS, "cast_then_scale", run=run)
    exact = x.double() @ weight.double().T
    twice, once = residual + exact.to(dtype), (residual.double() + exact).to(dtype)
    assert (y != twice).float().mean() < 2e-3 < 0.02 < (twice != once).float().mean()


def swiglu_in_fp64(x, gate, up, gate_bias, up_bias, norm):
    g, u = in_fp64(x, gate, gate_bias, None, norm), in_fp64(x, up, up_bias, None, norm)
    return g * torch.sigmoid(g) * u


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["apart", "merged", "interleaved"])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_swiglu(rows, layout, dtype, device, run, same_precision, poisoned_empty):
    inputs, width = 200, 21
    packed = drawn(2 * width, inputs, dtype=dtype, device=device, scale=0.1)
    gate, up = {
        "apart": (packed[:width].clone(), packed[width:].clone()),
        "merged": packed.chunk(2),
        "interleaved": (packed[0::2], packed[1::2]),
    }[layout]
    bias = drawn(2, width, dtype=dtype, device=device) if layout == "apart" else (None, None)
    x = drawn(rows, inputs, dtype=dtype, device=device)
    # A row's outputs share the last bit of its norm: only many rows tell whether that is as good as eager's.
    norm = 1 + drawn(inputs, dtype=dtype, device=device, scale=0.3) if rows == 16 else None
    arguments = x, gate, up, *bias, norm
    y = skinny_swiglu(*arguments, EPS, "cast_then_scale", run=run)
    assert y.shape == (rows, width) and y.dtype == dtype
    same_precision(y, swiglu_reference(*arguments, EPS, "cast_then_scale"), swiglu_in_fp64(*arguments))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_swiglu_over_several_blocks_of_inputs(device, run, same_precision):
    x, (gate, up) = drawn(2, 2100, device=device), drawn(2, 19, 2100, device=device, scale=0.05)
    y = skinny_swiglu(x, gate, up, None, None, None, EPS, "cast_then_scale", run=run)
    eager = swiglu_reference(x, gate, up, None, None, None, EPS, "cast_then_scale")
    same_precision(y, eager, swiglu_in_fp64(x, gate, up, None, None, None))


@pytest.mark.parametrize("layout", ["rows of a wider tensor", "last token", "transposed rows", "expanded"])
def test_any_strides(layout, device, run, same_precision):
    weight = drawn(24, 200, device=device)[:, :96]
    if layout == "rows of a wider tensor":
        x, residual = drawn(5, 200, device=device)[:, 100:196], drawn(5, 48, device=device)[:, ::2]
    elif layout == "last token":
        x, residual = drawn(3, 4, 96, device=device)[:, -1:], drawn(3, 4, 24, device=device)[:, -1:]
    elif layout == "transposed rows":
        x, residual = (drawn(2, 3, size, device=device).transpose(0, 1) for size in (96, 24))
    else:
        x, residual = drawn(1, 96, device=device).expand(4, 96), drawn(4, 24, device=device)
    y = skinny_linear(x, weight, None, residual, None, EPS, "cast_then_scale", run=run)
    eager = reference(x, weight, None, residual, None, EPS, "cast_then_scale")
    same_precision(y, eager, in_fp64(x, weight, None, residual, None))
    assert not TALLIES.of(run.receipt).fallbacks and y.is_contiguous()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_depends_on_no_other_and_not_on_their_number(dtype, device, run):
    x, weight = drawn(MAX_ROWS, 1100, dtype=dtype, device=device), drawn(40, 1100, dtype=dtype, device=device)
    norm, residual = drawn(1100, dtype=dtype, device=device), drawn(MAX_ROWS, 40, dtype=dtype, device=device)
    x[7] = torch.nan
    x[9] = torch.inf
    tail = norm, EPS, "cast_then_scale"
    together = skinny_linear(x, weight, None, residual, *tail, run=run)
    assert together[7].isnan().all() and together[[*range(7), 8, *range(10, 16)]].isfinite().all()
    for rows in (1, 2, 3, 5, 8):
        part = skinny_linear(x[:rows], weight, None, residual[:rows], *tail, run=run)
        bits = device == "cuda" or dtype != torch.float32  # numpy sums fp64 in an order that follows the shape
        limit = 0.0 if bits else 1e-6
        torch.testing.assert_close(part, together[:rows], rtol=limit, atol=limit, equal_nan=True)


def test_infinities_and_nan_reach_their_own_outputs_only(device, run):
    x, weight = torch.ones(2, 64, device=device), torch.ones(20, 64, device=device)
    weight[3, 5], weight[19, 63] = torch.inf, torch.nan
    y = skinny_linear(x, weight, None, None, None, EPS, "cast_then_scale", run=run)
    assert y[:, 3].isinf().all() and y[:, 19].isnan().all()
    assert (y[:, [n for n in range(20) if n not in (3, 19)]] == 64).all()


def test_zero_sizes_return_at_once(device, run):
    x, weight = torch.zeros(0, 8, device=device), torch.zeros(4, 8, device=device)
    assert skinny_linear(x, weight, None, None, None, EPS, "cast_then_scale", run=run).shape == (0, 4)
    assert skinny_swiglu(x, weight, weight, None, None, None, EPS, "cast_then_scale", run=run).shape == (0, 4)


def test_the_reference_in_fp64_is_the_oracle():
    x, weight, norm = drawn(3, 40).double(), drawn(7, 40).double(), drawn(40).double()
    bias, residual = drawn(7).double(), drawn(3, 7).double()
    arguments = x, weight, bias, residual, norm
    torch.testing.assert_close(reference(*arguments, EPS, "cast_then_scale"), in_fp64(*arguments))
    gated = x, weight, weight + 1, bias, bias, norm
    torch.testing.assert_close(swiglu_reference(*gated, EPS, "cast_then_scale"), swiglu_in_fp64(*gated))
    torch.testing.assert_close(F.linear(x, weight), in_fp64(x, weight, None, None, None))


def test_shape_classes_follow_the_weight_alone():
    assert shape_class(torch.bfloat16, 896) == "half 1024" == shape_class(torch.float16, 1024)
    assert shape_class(torch.float32, 4864) == "fp32 8192" == shape_class(torch.float32, 99_999)
    assert shape_class(torch.float32, 1) == f"fp32 {CLASSES[0]}"


def test_envelope(device):
    def why(x, weight, bias=None, residual=None, norm=None, order="cast_then_scale"):
        return skinny_linear.unsupported(x, weight, bias, residual, norm, EPS, order)

    x, weight = torch.zeros(2, 8, device=device), torch.zeros(4, 8, device=device)
    assert why(x, weight) is None
    assert "at most 16 rows" in why(torch.zeros(17, 8, device=device), weight)
    assert "fp32, fp16 or bf16" in why(x.double(), weight.double())
    assert "unit inner stride" in why(x, weight.half()) and "unit inner stride" in why(x, torch.zeros(8, 4).T)
    assert "merge into two" in why(torch.zeros(2, 16, device=device)[:, ::2], weight)
    assert "bias must be" in why(x, weight, bias=torch.zeros(5, device=device))
    assert "norm_weight must be" in why(x, weight, norm=torch.zeros(8, device=device).half())
    assert "order must be" in why(x, weight, norm=torch.zeros(8, device=device), order="other")
    assert "residual must be" in why(x, weight, residual=torch.zeros(2, 5, device=device))
    gated = (x, weight, weight[:3], None, None, None, EPS, "cast_then_scale")
    assert "alike" in skinny_swiglu.unsupported(*gated)
