"""Small kernels around the rounding helpers, importable by the process that compiles ahead of time."""

from voxfuse.kernels._rounding import add_rn, mul_rn, round_tf32
from voxfuse.kernels._triton import tl, triton


@triton.jit
def product_and_sum(a_ptr, b_ptr, c_ptr, out_ptr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    product = mul_rn(tl.load(a_ptr + i), tl.load(b_ptr + i), TARGET)
    tl.store(out_ptr + i, add_rn(product, tl.load(c_ptr + i), TARGET))


@triton.jit
def to_tf32(x_ptr, out_ptr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, round_tf32(tl.load(x_ptr + i), TARGET))
