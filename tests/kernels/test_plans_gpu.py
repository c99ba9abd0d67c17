"""Remembered launches on a GPU: sizes, strides and alignments that Triton compiles different kernels for, mixed."""

import itertools

import pytest
import torch

from voxfuse.kernels._op import Run
from voxfuse.kernels._plans import Plan
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.gqa_decode import reference as attention
from voxfuse.kernels.rmsnorm import add_reference, add_rms_norm
from voxfuse.kernels.swiglu import reference as gated
from voxfuse.kernels.swiglu import swiglu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
RUN = Run("triton", "plans gpu")


def planned(op):
    return sum(isinstance(plan, Plan) for plan in op._plans._plans.values())


def cut(rows, width, step, offset):
    """[rows, 1, width] with a stride of ``step`` between elements, ``offset`` elements behind an aligned address."""
    whole = torch.randn(rows * width * step + offset, device="cuda")[offset:]
    return whole[: rows * width * step].view(rows, 1, width * step)[..., ::step]


@torch.no_grad()
def test_sizes_strides_and_alignment():
    before = planned(swiglu), planned(add_rms_norm)
    cases = list(itertools.product((1, 3, 16), (1, 16, 17, 1000), (1, 2), (0, 1, 4), (0, 1)))
    for _ in range(4):
        for rows, width, step, offset, other in cases:
            x, y = cut(rows, width, step, offset), cut(rows, width, 1, other)
            torch.testing.assert_close(swiglu(x, y, run=RUN), gated(x, y), rtol=1e-5, atol=1e-6)
            weight = torch.randn(width, device="cuda")
            arguments = (x, y, weight, 1e-6, "scale_then_cast")
            found, expected = add_rms_norm(*arguments, run=RUN), add_reference(*arguments)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert planned(swiglu) > before[0] and planned(add_rms_norm) > before[1]


@torch.no_grad()
def test_two_launches_with_scratch_between_them_from_parts_of_one_projection():
    """Queries, keys and values lie in one memory, split over the keys: partial sums, then their merge."""
    before = planned(gqa_decode)
    for _ in range(5):
        q = torch.randn(2, 3, 1, 16 * 64, device="cuda", dtype=torch.bfloat16)[:, 0].view(2, 1, 16, 64).transpose(1, 2)
        k, v = torch.randn(2, 2, 4, 2048, 64, device="cuda", dtype=torch.bfloat16).unbind(1)
        lengths = torch.randint(1, 2048, (2,), device="cuda")
        arguments = (q, k, v, lengths, None, 0.125, True, 0)
        torch.testing.assert_close(gqa_decode(*arguments, run=RUN), attention(*arguments), rtol=2e-2, atol=2e-2)
    assert planned(gqa_decode) == before + 1


@torch.no_grad()
def test_planned_calls_under_capture_and_on_a_stream_of_their_own():
    gate, up = torch.randn(2, 4, 1, 3072, device="cuda")
    for _ in range(3):
        swiglu(gate, up, run=RUN)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = swiglu(gate, up, run=RUN)
    stream.synchronize()
    torch.testing.assert_close(y, gated(gate, up), rtol=1e-5, atol=1e-6)
    with torch.cuda.graph(graph):
        y = swiglu(gate, up, run=RUN)
    gate.normal_()
    graph.replay()
    torch.testing.assert_close(y, gated(gate, up), rtol=1e-5, atol=1e-6)
