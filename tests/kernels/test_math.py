"""The elementary functions against numpy in fp64, at the bounds that their docstrings state."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from voxfuse.kernels._math import exponential, hyperbolic_tangent, magnitude_angle, sin_squared, sine, sine_cosine

BLOCK = 4096


@triton.jit
def _kernel(x_ptr, y_ptr, out_ptr, NAME: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    if NAME == "exponential":
        result = exponential(x)
    elif NAME == "hyperbolic_tangent":
        result = hyperbolic_tangent(x)
    elif NAME == "sine":
        result = sine(x)
    elif NAME == "sin_squared":
        result = sin_squared(x)
    elif NAME == "sine_of_pair":
        result, _ = sine_cosine(x)
    elif NAME == "cosine_of_pair":
        _, result = sine_cosine(x)
    elif NAME == "magnitude":
        result, _ = magnitude_angle(x, tl.load(y_ptr + i))
    else:
        _, result = magnitude_angle(x, tl.load(y_ptr + i))
    tl.store(out_ptr + i, result)


def apply(name, device, x, y=None):
    """The function of fp32 values, as an fp64 array."""
    values = np.asarray(x, dtype=np.float32)
    pad = -len(values) % BLOCK
    first = torch.from_numpy(np.pad(values, (0, pad), mode="edge")).to(device)
    second = (
        first if y is None else torch.from_numpy(np.pad(np.asarray(y, np.float32), (0, pad), mode="edge")).to(device)
    )
    out = torch.empty_like(first)
    _kernel[(len(first) // BLOCK,)](first, second, out, name, BLOCK)
    return out.cpu().double().numpy()[: len(values)]


def spread(limit, count=20_000):
    """fp32 values up to a limit of either sign, evenly and by magnitude, with zero and the limit."""
    rng = np.random.default_rng(3)
    tiny = np.exp(rng.uniform(-60, 0, count // 2)) * rng.choice([-1, 1], count // 2)
    values = np.concatenate([rng.uniform(-1, 1, count // 2), tiny, [0.0, 1.0, -1.0]])
    return (values * limit).astype(np.float32)


@pytest.mark.parametrize(("limit", "bound"), [(4.0, 1.3e-7), (1e3, 2e-7), (9.9e5, 5e-7)])
@pytest.mark.parametrize(
    ("name", "exact"),
    [("sine", np.sin), ("sine_of_pair", np.sin), ("cosine_of_pair", np.cos), ("sin_squared", lambda x: np.sin(x) ** 2)],
)
def test_sines(name, exact, limit, bound, device):
    x = spread(limit)
    assert np.abs(apply(name, device, x) - exact(x.astype(np.float64))).max() < (
        5e-7 if name == "sin_squared" else bound
    )


def test_sine_keeps_relative_precision_near_zero(device):
    x = spread(1.0)
    x = x[x != 0]
    assert np.abs(apply("sine", device, x) / np.sin(x.astype(np.float64)) - 1).max() < 2e-7


def test_exponential(device):
    x = spread(87.0)
    assert np.abs(apply("exponential", device, x) / np.exp(x.astype(np.float64)) - 1).max() < 1.5e-7


def test_exponential_at_the_ends_of_fp32(device):
    x = [88.72, 88.73, 1e4, np.inf, -87.4, -100.0, -103.0, -105.0, -np.inf, np.nan]
    result = apply("exponential", device, x)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp(np.float32(x)).astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=2e-7, atol=1.5e-45)


def test_hyperbolic_tangent(device):
    x = np.concatenate([spread(12.0), np.linspace(0.6, 0.65, 500, dtype=np.float32)])
    x = x[x != 0]
    assert np.abs(apply("hyperbolic_tangent", device, x) / np.tanh(x.astype(np.float64)) - 1).max() < 2e-7
    ends = apply("hyperbolic_tangent", device, [0.0, np.inf, -np.inf, 100.0, np.nan])
    np.testing.assert_array_equal(ends, [0.0, 1.0, -1.0, 1.0, np.nan])


def test_magnitude_and_angle(device):
    rng = np.random.default_rng(4)
    x, y = (rng.choice([-1, 1], 20_000) * np.exp(rng.uniform(-30, 30, 20_000)) for _ in range(2))
    x[:5000] = y[:5000] * rng.uniform(-2, 2, 5000)  # near the diagonals too
    x, y = x.astype(np.float32), y.astype(np.float32)
    z = x.astype(np.float64) + 1j * y.astype(np.float64)
    assert np.abs(apply("magnitude", device, x, y) / np.abs(z) - 1).max() < 2e-7
    assert np.abs(apply("angle", device, x, y) - np.angle(z)).max() < 4e-7


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30])
def test_magnitude_neither_overflows_nor_underflows(scale, device):
    result = apply("magnitude", device, [3 * scale, -4 * scale], [4 * scale, 3 * scale])
    np.testing.assert_allclose(result, 5 * scale, rtol=1e-3 if scale < 1e-40 else 2e-7)


def test_angles_on_the_axes(device):
    pi = float(np.float32(np.pi))
    x = [1.0, -1.0, -1.0, 0.0, -0.0, -0.0, 0.0, 0.0, -1.0]
    y = [0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 1.0, -1.0, -1e-30]
    expected = [0.0, pi, pi, 0.0, 0.0, 0.0, pi / 2, -pi / 2, -pi]
    np.testing.assert_array_equal(apply("angle", device, x, y), expected)
