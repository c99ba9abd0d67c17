"""Rounding helpers: the portable twins by value in the interpreter, the CUDA twins by the instructions they become."""

import numpy as np
import pytest
import torch
from aot import Request, compile_ahead
from rounding_kernels import product_and_sum, to_tf32

from voxfuse.kernels._rounding import target

BLOCK = 64


def test_product_and_sum_round_separately(device):
    a = torch.randn(BLOCK, device=device)
    b = torch.randn(BLOCK, device=device)
    c = -(a * b)  # the rounded product: a fused multiply-add would leave the product's rounding error
    out = torch.full((BLOCK,), torch.nan, device=device)
    product_and_sum[(1,)](a, b, c, out, TARGET=target(), BLOCK=BLOCK)
    assert torch.equal(out, torch.zeros_like(out))


def test_tf32_rounds_to_nearest_ties_away(device):
    ulp = 2.0**-10
    x = torch.tensor([1 + ulp / 2, 1 + ulp / 2 - 2**-23, -1 - ulp / 2, 0.0, 3e38, torch.inf, -torch.inf, 1.0])
    expected = torch.tensor([1 + ulp, 1.0, -1 - ulp, 0.0, 3e38, torch.inf, -torch.inf, 1.0])
    x = torch.cat([x, torch.randn(BLOCK - 8)]).to(device)
    out = torch.full((BLOCK,), torch.nan, device=device)
    to_tf32[(1,)](x, out, TARGET=target(), BLOCK=BLOCK)
    assert torch.equal(out[:4].cpu(), expected[:4]) and torch.equal(out[5:8].cpu(), expected[5:8])
    assert torch.all(out.view(torch.int32) & 0x1FFF == 0)
    exact = x.double().cpu().numpy()
    step = 2.0 ** (np.floor(np.log2(np.abs(exact[8:]))) - 10)
    assert np.all(np.abs(out.double().cpu().numpy()[8:] - exact[8:]) <= step / 2)


@pytest.mark.aot
@pytest.mark.parametrize(("gpu", "twin"), [("sm_80", "cuda"), ("sm_90", "cuda"), ("sm_100", "cuda"), ("gfx942", "hip")])
def test_instructions(gpu, twin):
    patterns = (r"mul\.rn\.f32", r"cvt\.rna\.tf32\.f32", r"fma")
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr", "x_ptr", "out_ptr"), "*fp32")
    options = {"enable_fp_fusion": False} if twin == "hip" else {}
    made = compile_ahead(
        [
            Request(
                kernel=f"rounding_kernels:{kernel}",
                signature=pointers,
                constants={"TARGET": twin, "BLOCK": BLOCK},
                warps=1,
                target=gpu,
                patterns=patterns,
                options=options,
            )
            for kernel in ("product_and_sum", "to_tf32")
        ]
    )
    product, tf32 = (found.counts for found in made)
    assert product[r"fma"] == 0, "contracted"
    if twin == "cuda":
        assert product[r"mul\.rn\.f32"] > 0 and tf32[r"cvt\.rna\.tf32\.f32"] > 0
