"""A decode step with every projection through skinny_gemm on a GPU: fp64, rows in any company, a captured graph."""

import copy
import importlib.util

import pytest
import torch
from decoders import tiny
from decoding import Choice, error, generation, upstream

from voxfuse.fusions.decode_step import empty_cache, step
from voxfuse.kernels import _skinny_choice
from voxfuse.kernels._op import TALLIES, Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent"),
]

RUN = Run("triton", "projections gpu")
SIZES = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(_skinny_choice, "MOST_ROWS", Choice(lambda *key: True))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capacity", [32, 256])
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_twenty_tokens_in_the_same_precision(name, capacity, dtype):
    model = tiny(name, layers=2).to("cuda", dtype)
    exact = copy.deepcopy(model).double()
    decoders = generation(model, RUN, capacity=capacity), upstream(model), upstream(exact)
    token, logits = torch.tensor([4, 5, 6], device="cuda"), []
    for _ in range(20):
        logits.append([decode(token) for decode in decoders])
        token = logits[-1][1].argmax(-1)
    mine, eager, true = (torch.stack(kind) for kind in zip(*logits, strict=True))
    assert error(mine, true) <= max(1.25 * error(eager, true), torch.finfo(dtype).eps)
    assert TALLIES.of(RUN.receipt).fallbacks == {}


@torch.no_grad()
def test_replays_give_what_the_step_gives_at_qwen2s_sizes():
    model = tiny("Qwen2", layers=2, **SIZES).to("cuda", torch.bfloat16)
    rows, decoder = 3, model.model
    caches = [empty_cache(decoder, rows, 256) for _ in range(2)]
    x = torch.randn(rows, 1, 896, device="cuda", dtype=torch.bfloat16)
    lengths = torch.zeros(rows, dtype=torch.int64, device="cuda")
    step(decoder, x, caches[0], lengths, RUN, model.lm_head)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(decoder, x, caches[0], lengths, RUN, model.lm_head)
    for length in range(4):
        x.normal_()
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(logits, step(decoder, x, caches[1], lengths, RUN, model.lm_head))


@torch.no_grad()
def test_a_row_decodes_alone_as_among_sixteen():
    """Products, norms and attention: no kernel of the step lets rows see each other."""
    model = tiny("Qwen2", layers=2, **SIZES).to("cuda", torch.bfloat16)
    decoder, x = model.model, torch.randn(16, 1, 896, device="cuda", dtype=torch.bfloat16)
    together = step(decoder, x, empty_cache(decoder, 16, 256), torch.zeros(16, dtype=torch.int64, device="cuda"), RUN)
    for rows in (1, 4):
        lengths = torch.zeros(rows, dtype=torch.int64, device="cuda")
        assert torch.equal(step(decoder, x[:rows], empty_cache(decoder, rows, 256), lengths, RUN), together[:rows])
