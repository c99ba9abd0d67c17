"""Where kernel tests run: in the interpreter on the CPU, or on the GPU with VOXFUSE_TEST_GPU=1; and their bound."""

import os

import numpy as np
import pytest
import torch

from voxfuse.kernels._op import Run

ON_GPU = os.environ.get("VOXFUSE_TEST_GPU") == "1"


@pytest.fixture(autouse=True, scope="session")
def fused_multiply_add_rounds_once():
    """The interpreter computes ``tl.fma`` with two roundings, a GPU with one: through fp64, so does this."""
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    def create_fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
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
