"""A decode step whose projections run through skinny_gemm, all or some, against the untouched decoders."""

import copy
import importlib.util
import itertools
from collections import Counter

import pytest
import torch
from decoders import SIZES, tiny
from decoding import PROMPTS, Choice, error, generation, upstream
from torch.utils._python_dispatch import TorchDispatchMode

from voxfuse.kernels import _measured, skinny_gemm
from voxfuse.kernels._op import TALLIES, Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")

NAMES = ("Qwen2", "Qwen3", "Llama")
REFERENCE = Run("reference", "test_projections")
STEPS = 6


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(_measured, "MOST_ROWS", Choice(lambda *key: True))


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_free_running_greedy_tokens_are_upstreams(name, everywhere):
    model = tiny(name, layers=2)
    ours, theirs = generation(model, REFERENCE), upstream(model)
    token = torch.tensor([4, 5, 6])
    mine, expected = [token], [token]
    for _ in range(60):
        mine.append(ours(mine[-1]).argmax(-1))
        expected.append(theirs(expected[-1]).argmax(-1))
    assert torch.equal(torch.stack(mine), torch.stack(expected))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_in_the_interpreter(name, dtype, everywhere, request):
    run = Run("interpreter", request.node.nodeid)
    model = tiny(name, layers=2).to(dtype)
    exact = copy.deepcopy(model).double()
    decoders = generation(model, run), upstream(model), upstream(exact)
    tokens = torch.randint(SIZES["vocab_size"], (STEPS, 3), generator=torch.Generator().manual_seed(2))
    logits = [[decode(token) for decode in decoders] for token in tokens]
    mine, eager, true = (torch.stack(kind) for kind in zip(*logits, strict=True))
    bound = max(1.25 * error(eager, true), 4 * torch.finfo(dtype).eps)  # of all: a step's own is half chance
    assert error(mine, true) <= bound
    tally = TALLIES.of(run.receipt)
    assert not tally.fallbacks and tally.calls == STEPS * (2 * 6 + 1)  # six a layer, and the norm with the head


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_few_tokens_as_of_a_code_predictor(name, everywhere, request):
    model = tiny(name, layers=2)
    short, theirs = generation(model, REFERENCE, capacity=32), upstream(model)
    interpreted = generation(model, Run("interpreter", request.node.nodeid), capacity=32)
    for token in map(torch.tensor, ([3, 8, 1], [5, 4, 9])):
        expected = theirs(token)
        for ours in (short, interpreted):
            torch.testing.assert_close(ours(token), expected, rtol=1e-4, atol=1e-5)
    tally = TALLIES.of(request.node.nodeid)
    assert not tally.fallbacks and tally.calls == 2 * (2 * 5 + 1)


class Counting(TorchDispatchMode):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).split(".")[1]
        if not function.is_view and name != "_unsafe_view":
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_six_operations_a_layer(everywhere):
    totals = []
    for layers in (1, 2):
        model, counts = tiny("Qwen3", layers=layers), Counter()
        generation(model, REFERENCE)(torch.tensor([4, 5, 6]))  # packs
        decode = generation(model, REFERENCE)
        with Counting(counts):
            decode(torch.tensor([4, 5, 6]))
        totals.append(counts)
    layer = totals[1] - totals[0]
    assert layer == {"skinny_linear": 3, "qk_norm_rope_cached": 1, "gqa_decode": 1, "skinny_swiglu": 1}


@torch.no_grad()
def test_the_step_takes_what_the_table_of_its_gpu_says(monkeypatch):
    """Tiny Qwen3 in bf16: QKV, output, down and the gates of a layer at their own limits of rows; three rows."""
    table = {
        ("9.0", "skinny_linear", "half", 64, 32): 3,  # QKV: 4 + 2 · 2 heads of 8
        ("9.0", "skinny_linear", "half", 32, 48): 16,  # down
        ("9.0", "skinny_swiglu", "half", 48, 32): 2,  # gate and up, of fewer rows
        ("10.0", "skinny_linear", "half", 32, 32): 16,  # output, of another GPU
    }
    monkeypatch.setattr(_measured, "MOST_ROWS", table)
    model = tiny("Qwen3", head_dim=8).bfloat16()

    def counted(gpu, prompts):
        monkeypatch.setattr(_measured, "_capability_of", lambda device: gpu)
        generation(model, REFERENCE, prompts)(torch.tensor([4] * len(prompts)))  # packs
        decode, counts = generation(model, REFERENCE, prompts), Counter()
        with Counting(counts):
            decode(torch.tensor([4] * len(prompts)))
        return counts["skinny_linear"], counts["skinny_swiglu"], counts["swiglu"]

    assert counted("9.0", PROMPTS) == (2, 0, 1)
    assert counted("9.0", PROMPTS[:2]) == (2, 1, 0)
    assert counted("9.0", [*PROMPTS, PROMPTS[0]]) == (1, 0, 1)
    assert counted("10.0", PROMPTS) == (1, 0, 1)
    assert counted(None, PROMPTS) == (0, 0, 1)


@torch.no_grad()
def test_any_mixture_with_cublas_is_upstreams(monkeypatch):
    """Tiny Llama: hidden 32, intermediate 48, 4 and 2 heads of 8: each projection has a shape of its own but o_proj."""
    model = tiny("Llama", layers=2, head_dim=12, attention_bias=True, mlp_bias=True)
    shapes = [(96, 32), (32, 48), (48, 32), (50, 32)]  # QKV, output and down, gate, head
    expected = upstream(model)(torch.tensor([4, 5, 6]))
    for chosen in itertools.product((False, True), repeat=len(shapes)):
        wanted = {shape for shape, on in zip(shapes, chosen, strict=True) if on}
        monkeypatch.setattr(_measured, "MOST_ROWS", Choice(lambda gpu, operation, kind, *shape: shape in wanted))  # noqa: B023
        ours = generation(model, REFERENCE)(torch.tensor([4, 5, 6]))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_is_not_measured_runs_cublas():
    assert _measured.fastest(1, torch.empty(17, 23)) == "cublas"
    assert _measured.fastest(1, torch.empty(17, 23), _measured.GATED) == "cublas"


@torch.no_grad()
def test_the_table_is_asked_by_kind_type_and_shape(monkeypatch):
    monkeypatch.setattr(_measured, "MOST_ROWS", {(None, "skinny_linear", "half", 24, 16): 4})
    weight = torch.empty(24, 16, dtype=torch.bfloat16)
    assert [_measured.fastest(rows, weight) for rows in (1, 4, 5)] == ["skinny", "skinny", "cublas"]
    for other in (weight.T, weight.float()):
        assert _measured.fastest(1, other) == "cublas"
    assert _measured.fastest(1, weight, _measured.GATED) == "cublas"
    assert _measured.fastest(1, weight.half()) == "skinny"


def test_every_shape_that_was_measured_is_one_that_the_kernel_takes():
    for gpu, operation, kind, outputs, inputs in _measured.MOST_ROWS:
        rows = _measured.MOST_ROWS[gpu, operation, kind, outputs, inputs]
        assert operation in ("skinny_linear", "skinny_swiglu") and kind in ("half", "fp32")
        x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16) for n in (rows, outputs))
        assert rows and skinny_gemm.unsupported(x, weight, None, None, None, 0.0, "cast_then_scale") is None


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "prompts", "a_layer"), [("bfloat16", 1, 7), ("bfloat16", 8, 9), ("float32", 1, 10)])
def test_kernels_of_a_token_at_qwen2s_sizes(dtype, prompts, a_layer, monkeypatch):
    """24 layers and what a step needs once are at most 200 kernels before graphs, at one row in bf16. fp32 runs cuBLAS
    and has 240; a profile of the H200 counted 171 and 244."""
    monkeypatch.setattr(_measured, "_capability_of", lambda device: "9.0")
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    totals = []
    for layers in (1, 2):
        model, counts = tiny("Qwen2", layers=layers, **sizes).to(getattr(torch, dtype)), Counter()
        ids = torch.tensor([4] * prompts)
        generation(model, REFERENCE, [[3, 9]] * prompts)(ids)  # packs
        decode = generation(model, REFERENCE, [[3, 9]] * prompts)
        with Counting(counts):
            decode(ids)
        totals.append(counts)
    layer = totals[1] - totals[0]
    assert layer["gqa_decode"] == 1  # two kernels
    assert layer.total() + 1 == a_layer, layer
    assert (24 * a_layer + 4 <= 200) == (dtype == "bfloat16" and prompts == 1)
