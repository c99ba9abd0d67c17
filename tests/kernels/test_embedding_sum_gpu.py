"""Sums of codebook embeddings on a GPU: bits of upstream's loop, a graph, host cost."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.embedding_sum import embedding_sum, reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "embedding_sum gpu")


def case(tokens, dtype, codebooks=16, entries=2048, hidden=1024):
    ids = torch.randint(0, entries, (tokens, codebooks), device="cuda")
    table = torch.randn(codebooks * entries, hidden, device="cuda").to(dtype)
    return ids, table, torch.arange(codebooks, device="cuda") * entries


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_orders_at_the_real_shapes(dtype, same_precision):
    for tokens in (1, 16, 300):
        ids, table, offsets = case(tokens, dtype)
        for order in ("once", "mean"):
            exact = reference(ids, table.double(), offsets, order)
            same_precision(
                embedding_sum(ids, table, offsets, order, run=RUN), reference(ids, table, offsets, order), exact
            )
        assert torch.equal(embedding_sum(ids, table, offsets, "each", run=RUN), reference(ids, table, offsets, "each"))
    assert TALLIES.of(RUN.receipt).fallbacks == {}


@torch.no_grad()
def test_replays_follow_their_ids():
    ids, table, offsets = case(2, torch.bfloat16)
    embedding_sum(ids, table, offsets, "each", run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = embedding_sum(ids, table, offsets, "each", run=RUN)
    for _ in range(3):
        ids.random_(0, 2048)
        graph.replay()
        assert torch.equal(y, reference(ids, table, offsets, "each"))


@torch.no_grad()
def test_host_cost_of_a_call():
    arguments = case(1, torch.bfloat16)
    assert_cheap(lambda: embedding_sum(*arguments, "once", run=RUN))
