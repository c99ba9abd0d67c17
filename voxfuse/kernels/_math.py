"""Shared device functions: elementary functions as polynomials, and moments that merge without cancellation.

Polynomials, because libdevice exists on CUDA alone, and because Triton's own approximations differ between targets.
"""

from __future__ import annotations

from voxfuse.kernels._triton import tl, triton


@triton.jit
def sin_squared(theta):
    """sin(theta)² in fp32. Its period is pi, so the reduction needs no quadrant; absolute error below 5e-7 for
    |theta| < 1e6 (correctly rounded fp32 sine: 1.3e-7).

    A polynomial, because ``tl.sin`` costs a 32-byte stack and a branch for large arguments on CUDA. Its constants are
    literals, because Triton compares every global that a kernel uses at every launch.
    """
    _, r = _half_turns(theta)
    sine = sine_near_zero(r)
    return sine * sine


@triton.jit
def sine(theta):
    """sin(theta) in fp32; absolute error below 2e-7 for |theta| < 1e3, 5e-7 for |theta| < 1e6."""
    turns, r = _half_turns(theta)
    value = sine_near_zero(r)
    return tl.where(_odd(turns), -value, value)


@triton.jit
def sine_cosine(theta):
    """sin(theta) and cos(theta) in fp32; absolute errors as of ``sine``."""
    turns, r = _half_turns(theta)
    flip = _odd(turns)
    sin_r = sine_near_zero(r)
    # cos(r) = 1 + r² (C1 + r² (C2 + …)) on |r| <= pi/2, minimax: absolute error 2.4e-10 before rounding
    r2 = r * r
    p = tl.fma(r2, -2.6077098e-07, 2.476188580e-05)
    p = tl.fma(r2, p, -0.001388840350)
    p = tl.fma(r2, p, 0.04166664073)
    p = tl.fma(r2, p, -0.4999999955)
    cos_r = tl.fma(r2, p, 1.0)
    return tl.where(flip, -sin_r, sin_r), tl.where(flip, -cos_r, cos_r)


@triton.jit
def exponential(x):
    """exp(x) in fp32, relative error below 1.5e-7; overflows to infinity, underflows gradually, keeps NaN.

    ``tl.exp`` rounds x · log2(e) on CUDA, which costs |x| / 2 units in the last place.
    """
    x = tl.where(x > 89.0, 89.0, tl.where(x < -104.0, -104.0, x))
    octaves = tl.floor(x * 1.4426950408889634 + 0.5)
    r = tl.fma(octaves, -0.693145751953125, x)  # ln 2 in two parts: the first has 9 trailing zero bits
    r = tl.fma(octaves, -1.428606820309417e-06, r)
    # exp(r) = 1 + r + r² (E0 + r (E1 + …)) on |r| <= ln(2)/2, minimax: relative error 3.3e-9 before rounding
    p = tl.fma(r, 0.001381314098, 0.008369418936)
    p = tl.fma(r, p, 0.04166845686)
    p = tl.fma(r, p, 0.1666651479)
    p = tl.fma(r, p, 0.4999999305)
    p = tl.fma(r * r, p, r) + 1.0
    half = tl.floor(octaves * 0.5)  # in two steps: 2^octaves may lie outside fp32 where exp(x) does not
    return p * _power_of_two(half) * _power_of_two(octaves - half)


@triton.jit
def hyperbolic_tangent(x):
    """tanh(x) in fp32, relative error below 2e-7 (exp alone cancels near zero)."""
    # tanh(x) = x + x³ (T0 + x² (T1 + …)) on |x| <= 0.625, minimax: relative error 4.1e-9 before rounding
    x2 = x * x
    p = tl.fma(x2, -0.005717041846, 0.02065058420)
    p = tl.fma(x2, p, -0.05374349706)
    p = tl.fma(x2, p, 0.1333149127)
    p = tl.fma(x2, p, -0.3333328392)
    near = tl.fma(x * x2, p, x)
    far = 1.0 - tl.div_rn(2.0, exponential(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) <= 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def magnitude_angle(real, imaginary):
    """|z| and arg(z) in (-pi, pi] of z in fp32; relative error of the magnitude below 2e-7, absolute of the angle below
    4e-7. A zero imaginary part of either sign counts as +0 (angle 0 or +pi), and z = 0 has angle 0. Nothing overflows
    or underflows on the way."""
    a, b = tl.abs(real), tl.abs(imaginary)
    steep = b > a
    long, short = tl.where(steep, b, a), tl.where(steep, a, b)
    q = tl.div_rn(short, tl.where(long == 0, 1.0, long))
    q2 = q * q
    # atan(q) = q + q³ (A0 + q² (A1 + …)) on [0, 1], minimax: relative error 1.7e-8 before rounding
    p = tl.fma(q2, 0.002920683031, -0.01636789304)
    p = tl.fma(q2, p, 0.04321180838)
    p = tl.fma(q2, p, -0.07552210423)
    p = tl.fma(q2, p, 0.1066600327)
    p = tl.fma(q2, p, -0.1421105516)
    p = tl.fma(q2, p, 0.1999377286)
    p = tl.fma(q2, p, -0.3333315274)
    angle = tl.fma(q * q2, p, q)
    angle = tl.where(steep, (1.5707963705062866 - angle) - 4.371139000186241e-08, angle)  # pi/2 as two fp32
    angle = tl.where(real < 0, (3.1415927410125732 - angle) - 8.742278000372482e-08, angle)
    return long * tl.sqrt_rn(q2 + 1.0), tl.where(imaginary < 0, -angle, angle)


@triton.jit
def sine_near_zero(r):
    """sin(r) for |r| <= pi/2: r + r³ (S1 + r² (S2 + …)), minimax, relative error 6.8e-9 before rounding."""
    r2 = r * r
    p = tl.fma(r2, 2.602776085e-06, -0.0001980830543)
    p = tl.fma(r2, p, 0.008333049517)
    p = tl.fma(r2, p, -0.1666665894)
    return tl.fma(r * r2, p, r)


@triton.jit
def _half_turns(theta):
    """theta / pi to the nearest integer, and what theta is beyond that many pi."""
    turns = tl.floor(theta * 0.31830988618379067 + 0.5)
    # theta - turns · pi, with pi as the sum of three float32 (Cody and Waite 1980)
    r = tl.fma(turns, -3.1415927410125732, theta)
    r = tl.fma(turns, 8.742277657347586e-08, r)
    return turns, tl.fma(turns, 3.4302490200117637e-15, r)


@triton.jit
def _odd(integer):
    """Whether an integer held in fp32 is odd."""
    half = integer * 0.5
    return half != tl.floor(half)


@triton.jit
def _power_of_two(exponent):
    """2^exponent for an integer in fp32, -126 to 127."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


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
