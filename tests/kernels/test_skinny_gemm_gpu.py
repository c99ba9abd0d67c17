"""skinny_gemm where only a GPU can tell: real shapes, rows in any company bit for bit, graphs, host cost."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.skinny_gemm import MAX_ROWS, reference, skinny_linear, skinny_swiglu, swiglu_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "skinny_gemm gpu")
TAIL = 1e-6, "cast_then_scale"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
# K, N, normed: Qwen2-0.5B's projections, a head of odd size, and a K that no block divides
SHAPES = [(896, 1152, True), (896, 896, False), (4864, 896, False), (896, 6761, True), (2056, 333, True)]


def drawn(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def weights(outputs, inputs, dtype):
    return (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).to(dtype)


def double(arguments):
    return tuple(value.double() if isinstance(value, torch.Tensor) else value for value in arguments)


@pytest.fixture
def right(same_precision):
    """A function that runs an operation, asserts its contract, and gives its result."""

    def run(op, reference_, arguments):
        y = op(*arguments, run=RUN)
        same_precision(y, reference_(*arguments), reference_(*double(arguments)))
        return y

    return run


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(shape, dtype, right):
    inputs, outputs, normed = shape
    x, weight = drawn(MAX_ROWS, 1, inputs, dtype=dtype), weights(outputs, inputs, dtype)
    norm, bias = (drawn(inputs, dtype=dtype), drawn(outputs, dtype=dtype)) if normed else (None, None)
    residual = None if normed else drawn(MAX_ROWS, 1, outputs, dtype=dtype)
    together = right(skinny_linear, reference, (x, weight, bias, residual, norm, *TAIL))
    for rows in range(1, MAX_ROWS):
        part = None if residual is None else residual[:rows]
        assert torch.equal(skinny_linear(x[:rows], weight, bias, part, norm, *TAIL, run=RUN), together[:rows]), rows
    alone = skinny_linear(x[11:12], weight, bias, None if residual is None else residual[11:12], norm, *TAIL, run=RUN)
    assert torch.equal(alone, together[11:12])
    assert TALLIES.of(RUN.receipt).fallbacks == {}


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(896, 4864), (1024, 4096), (2048, 6144)], ids=str)
def test_a_gated_row_has_the_same_bits_in_any_company(shape, dtype, right):
    inputs, width = shape
    gate, up = weights(2 * width, inputs, dtype).chunk(2)
    x, norm = drawn(MAX_ROWS, inputs, dtype=dtype), drawn(inputs, dtype=dtype)
    together = right(skinny_swiglu, swiglu_reference, (x, gate, up, None, None, norm, *TAIL))
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 15):
        assert torch.equal(skinny_swiglu(x[:rows], gate, up, None, None, norm, *TAIL, run=RUN), together[:rows]), rows


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES)
def test_addresses_and_strides_that_forbid_wide_loads(dtype, right):
    flat = drawn(40 * 905 + 1, dtype=dtype)
    weight = flat[1:].view(40, 905)[:, 3:903]  # 900 of 905 columns, off by four elements
    x = drawn(5, 907, dtype=dtype)[:, 5:905]
    right(skinny_linear, reference, (x, weight, None, None, drawn(900, dtype=dtype), *TAIL))


@torch.no_grad()
@pytest.mark.parametrize("dtype", TYPES)
def test_large_and_tiny_values(dtype, right):
    x, weight = drawn(4, 896, dtype=dtype), weights(64, 896, dtype)
    for scale in (1e3, 1e-3):
        x_scaled, weight_scaled = x * scale, weight / scale
        right(skinny_linear, reference, (x_scaled, weight_scaled, None, None, None, *TAIL))


@torch.no_grad()
def test_replays_follow_their_inputs():
    x, weight = drawn(2, 1, 896, dtype=torch.bfloat16), weights(1152, 896, torch.bfloat16)
    norm = drawn(896, dtype=torch.bfloat16)
    skinny_linear(x, weight, None, None, norm, *TAIL, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = skinny_linear(x, weight, None, None, norm, *TAIL, run=RUN)
    for _ in range(3):
        x.normal_()
        weight.normal_(0, 0.03)
        graph.replay()
        torch.testing.assert_close(y, reference(x, weight, None, None, norm, *TAIL), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_host_cost_of_a_call():
    x, weight = drawn(1, 1, 896, dtype=torch.bfloat16), weights(1152, 896, torch.bfloat16)
    norm, residual = drawn(896, dtype=torch.bfloat16), drawn(1, 1, 1152, dtype=torch.bfloat16)
    gate, up = weights(2 * 4864, 896, torch.bfloat16).chunk(2)
    assert_cheap(lambda: skinny_linear(x, weight, None, residual, norm, *TAIL, run=RUN))
    assert_cheap(lambda: skinny_swiglu(x, gate, up, None, None, norm, *TAIL, run=RUN))
    assert TALLIES.of(RUN.receipt).fallbacks == {}
