"""Where kernel tests run: in the interpreter on the CPU, or on the GPU with VOXFUSE_TEST_GPU=1; and their bound."""

import os

import numpy as np
import pytest
import torch

from voxfuse.kernels._op import Run

ON_GPU = os.environ.get("VOXFUSE_TEST_GPU") == "1"


@pytest.fixture(autouse=True, scope="session")
def interpreter_rounds_as_a_gpu():
    """The interpreter computes ``tl.fma`` with two roundings, a GPU with one: through fp64, so does this. And an fp32
    ``tl.dot`` in an order of NumPy's own choice; a GPU adds up one by one, with fused multiply-adds."""
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    numpys_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, c, *options):
        if a.data.dtype != np.float32:
            return numpys_dot(self, a, b, c, *options)
        sums = c.data
        for k in range(a.data.shape[-1]):
            exact = a.data[..., :, k, None].astype(np.float64) * b.data[..., k, None, :].astype(np.float64) + sums
            sums = exact.astype(np.float32)
        return interpreter.TensorHandle(sums, c.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
        yield


@pytest.fixture
def device() -> str:
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """A run of the kernel itself, on a receipt of the test's own."""
    return Run("triton" if ON_GPU else "interpreter", request.node.nodeid)


def relative_rms(value: torch.Tensor, oracle: torch.Tensor) -> float:
    """‖value − oracle‖ / ‖oracle‖ in fp64."""
    return ((value.double() - oracle).norm() / oracle.norm()).item()


def assert_same_precision(value: torch.Tensor, eager: torch.Tensor, oracle: torch.Tensor) -> None:
    """The contract ``same-precision``: at most max(1.25 × the eager chain's error, one unit in the last place)."""
    bound = max(1.25 * relative_rms(eager, oracle), torch.finfo(value.dtype).eps)
    error = relative_rms(value, oracle)
    assert error <= bound, f"relative RMS error {error:.2e} is above {bound:.2e}"


@pytest.fixture
def same_precision():
    return assert_same_precision
