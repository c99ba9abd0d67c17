"""SwiGLU against the upstream chain in fp64: types, strides, packed projections, extremes."""

import pytest
import torch
import torch.nn.functional as F

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.swiglu import BLOCK, reference, swiglu

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def in_fp64(gate, up):
    return gate.double() * torch.sigmoid(gate.double()) * up.double()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 4864), (3, 5, 72), (7, 1), (2, BLOCK + 1)])
def test_same_precision_as_upstream(shape, dtype, device, run, same_precision, poisoned_empty):
    gate, up = (torch.randn(shape).to(device, dtype) * 3 for _ in range(2))
    result = swiglu(gate, up, run=run)
    assert result.dtype == dtype and result.shape == shape
    same_precision(result, reference(gate, up), in_fp64(gate, up))
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_is_rounded_before_the_product(dtype, device, run):
    gate, up = (torch.randn(40, 96).to(device, dtype) for _ in range(2))
    result = swiglu(gate, up, run=run)
    eager = F.silu(gate.float()).to(dtype) * up
    assert (result != eager).float().mean() < 1e-3
    once = (F.silu(gate.float()) * up.float()).to(dtype)
    assert (once != eager).float().mean() > 0.05, "the data cannot tell the two orders apart"


def test_extremes(device, run):
    gate = torch.tensor([0.0, -0.0, 88.0, -88.0, -104.0, -200.0, 1e30, -1e30, torch.nan, torch.inf], device=device)
    up = torch.full_like(gate, 2.0)
    torch.testing.assert_close(swiglu(gate, up, run=run), F.silu(gate) * up, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("layout", ["packed", "packed, last token", "transposed", "unlike rows"])
def test_any_strides(layout, device, run, same_precision):
    if layout == "packed":
        gate, up = torch.randn(2, 3, 192, device=device).chunk(2, dim=-1)
    elif layout == "packed, last token":
        gate, up = torch.randn(2, 3, 192, device=device)[:, -1:].chunk(2, dim=-1)
    elif layout == "transposed":
        gate, up = (torch.randn(40, 6, device=device).T for _ in range(2))
    else:
        gate, up = torch.randn(2, 3, 40, device=device), torch.randn(3, 2, 40, device=device).transpose(0, 1)
    result = swiglu(gate, up, run=run)
    same_precision(result, reference(gate, up), in_fp64(gate, up))
    assert not TALLIES.of(run.receipt).fallbacks and result.is_contiguous()


def test_zero_sizes_return_at_once(device, run):
    assert swiglu(*torch.zeros(2, 0, 8, device=device), run=run).shape == (0, 8)


def test_envelope(device):
    x = torch.zeros(2, 8, device=device)
    assert "one type" in swiglu.unsupported(x, x.half()) and "one type" in swiglu.unsupported(x.double(), x.double())
    assert "alike" in swiglu.unsupported(x, x[:, :4])
    cube = torch.zeros(4, 4, 4, 8, device=device).permute(2, 1, 0, 3)
    assert "merge into two" in swiglu.unsupported(cube, cube)
