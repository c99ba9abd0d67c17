"""Shared device functions: moments that merge without cancellation, and the square of a sine."""

from __future__ import annotations

from voxfuse.kernels._triton import tl, triton


@triton.jit
def sin_squared(theta):
    """sin(theta)² in fp32. Its period is pi, so the reduction needs no quadrant; absolute error below 5e-7 for
    |theta| < 1e6 (correctly rounded fp32 sine: 1.3e-7).

    A polynomial, because ``tl.sin`` costs a 32-byte stack and a branch for large arguments on CUDA. Its constants are
    literals, because Triton compares every global that a kernel uses at every launch.
    """
    turns = tl.floor(theta * 0.31830988618379067 + 0.5)
    # theta - turns · pi, with pi as the sum of three float32 (Cody and Waite 1980)
    r = tl.fma(turns, -3.1415927410125732, theta)
    r = tl.fma(turns, 8.742277657347586e-08, r)
    r = tl.fma(turns, 3.4302490200117637e-15, r)
    # sin(r) = r + r³ (S1 + r² (S2 + …)) on |r| <= pi/2, minimax: relative error 6.8e-9 before rounding
    r2 = r * r
    p = tl.fma(r2, 2.602776085e-06, -0.0001980830543)
    p = tl.fma(r2, p, 0.008333049517)
    p = tl.fma(r2, p, -0.1666665894)
    sine = tl.fma(r * r2, p, r)
    return sine * sine


@triton.jit
def merge_moments(count, mean, m2):
    """Merge (count, mean, sum of squared deviations) over axis 0 (Chan, Golub and LeVeque 1983, eq. 2.1).

    Returns the total count, the mean as a rounded value plus its remainder, and the merged sum: with the remainder,
    a mean that is large against the deviations costs no precision.
    """
    total = tl.sum(count, axis=0)
    merged = tl.sum(count * mean, axis=0) / tl.maximum(total, 1.0)
    deviation = mean - merged
    remainder = tl.sum(count * deviation, axis=0) / tl.maximum(total, 1.0)
    return total, merged, remainder, tl.sum(m2 + count * deviation * deviation, axis=0)
