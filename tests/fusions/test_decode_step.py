"""The fused decode step against the untouched Qwen2, Qwen3 and Llama of transformers with tiny random weights."""

import copy
import importlib.util
from collections import Counter

import pytest
import torch
from decoders import prefill, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from voxfuse.fusions.decode_step import KeyValues, adopt, empty_cache, step, unsupported
from voxfuse.kernels._op import TALLIES, Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")

NAMES = ("Qwen2", "Qwen3", "Llama")
RUN = Run("reference", "test_decode_step")


class Decode:
    """A generation through ``step``, behind upstream's prefill; NaN wherever no key or value was written."""

    def __init__(self, model, prompts, capacity=256, run=RUN):
        self.model, self.run = model, run
        past, self.logits, lengths = prefill(model, prompts)
        self.cache = KeyValues(*(part.fill_(torch.nan) for part in empty_cache(model.model, len(prompts), capacity)))
        adopt(self.cache, past, lengths)
        self.lengths = torch.tensor(lengths)

    def __call__(self, ids):
        embeddings = self.model.model.embed_tokens(ids.view(-1, 1))
        logits = step(self.model.model, embeddings, self.cache, self.lengths, self.run, head=self.model.lm_head)
        self.lengths = self.lengths + 1
        return logits[:, 0]


class Upstream:
    """The same through the model's own forward, each row by itself: no padding, no batch."""

    def __init__(self, model, prompts):
        self.model = model
        rows = [prefill(model, [prompt]) for prompt in prompts]
        self.pasts, self.logits = [row[0] for row in rows], torch.cat([row[1] for row in rows])

    def __call__(self, ids):
        rows = zip(ids.view(-1, 1, 1), self.pasts, strict=True)
        return torch.cat([self.model(i, past_key_values=past, use_cache=True).logits[:, -1] for i, past in rows])


PROMPTS = [[3, 9, 4, 1, 5], [7, 2], [11, 12, 13, 14, 15, 16, 17, 18, 19]]


def error(value, oracle):
    return ((value.double() - oracle).norm() / oracle.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_hundred_greedy_tokens_of_rows_of_different_length(name, dtype):
    model = tiny(name, layers=2).to(dtype)
    exact = copy.deepcopy(model).double()
    ours, theirs, oracle = Decode(model, PROMPTS), Upstream(model, PROMPTS), Upstream(exact, PROMPTS)
    token, logits = theirs.logits.argmax(-1), []
    for _ in range(200):  # all are fed upstream's token
        logits.append([generation(token) for generation in (ours, theirs, oracle)])
        token = logits[-1][1].argmax(-1)
    mine, eager, true = (torch.stack(kind) for kind in zip(*logits, strict=True))
    assert error(mine, true) <= 1.25 * error(eager, true), f"{error(mine, true):.2e}, eager {error(eager, true):.2e}"
    best = eager.float().topk(2, dim=-1).values
    close = (
        best[..., 0] - best[..., 1] <= 2 * torch.finfo(dtype).eps * best[..., 0].abs()
    )  # two units in the last place
    assert torch.all((mine.argmax(-1) == eager.argmax(-1)) | close)
    assert TALLIES.of(RUN.receipt).fallbacks == {}


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_free_running_greedy_tokens_are_upstreams(name):
    model = tiny(name, layers=2)
    ours, theirs = Decode(model, PROMPTS), Upstream(model, PROMPTS)
    mine, upstream = [ours.logits.argmax(-1)], [theirs.logits.argmax(-1)]
    for _ in range(200):
        mine.append(ours(mine[-1]).argmax(-1))
        upstream.append(theirs(upstream[-1]).argmax(-1))
    assert torch.equal(torch.stack(mine), torch.stack(upstream))
    assert torch.stack(upstream).unique().numel() > 10, "a loop over few tokens tells little"


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_kernels_in_the_interpreter(name, request):
    run = Run("interpreter", request.node.nodeid)
    model = tiny(name)
    ours, theirs = Decode(model, PROMPTS[:2], 40, run), Upstream(model, PROMPTS[:2])
    for token in ([3, 8], [5, 4]):
        torch.testing.assert_close(ours(torch.tensor(token)), theirs(torch.tensor(token)), rtol=1e-4, atol=1e-5)
    tally = TALLIES.of(run.receipt)
    assert tally.calls == 2 * 6 and not tally.fallbacks  # norm, rope, attention, norm, SwiGLU, norm


@torch.no_grad()
@pytest.mark.parametrize("changes", [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"head_dim": 20}])
def test_head_groups(changes):
    model = tiny("Llama", **changes)
    ours, theirs = Decode(model, PROMPTS), Upstream(model, PROMPTS)
    token = torch.tensor([4, 5, 6])
    torch.testing.assert_close(ours(token), theirs(token), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_biases_and_a_sliding_window():
    biased = tiny("Llama", attention_bias=True, mlp_bias=True)
    windowed = tiny("Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=0)
    assert unsupported(windowed.model) is None or "sliding window" in unsupported(windowed.model)  # 4.51
    for model in (biased, *([windowed] if unsupported(windowed.model) is None else [])):
        past, _, _ = prefill(model, [PROMPTS[0]])
        cache = empty_cache(model.model, 1, 32)
        pairs = [(p.keys, p.values) for p in past.layers] if hasattr(past, "layers") else past
        for index, (keys, values) in enumerate(pairs):  # 5 keys: the window has cut nothing yet
            cache.keys[index, :, :, :5], cache.values[index, :, :, :5] = keys, values
        for position in range(5, 12):
            token = torch.tensor([[position]])
            embedded = model.model.embed_tokens(token)
            fused = step(model.model, embedded, cache, torch.tensor([position]), RUN, head=model.lm_head)
            expected = model(token, past_key_values=past, use_cache=True).logits
            torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)


VIEWS = {"view", "_unsafe_view", "split", "split_with_sizes", "unsqueeze", "transpose", "select", "t", "slice", "alias"}


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_ten_kernels_a_layer(name):
    """Nine operations, of which attention is two kernels; what a step needs once is four more."""

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operation = func.overloadpacket.__name__
            if operation not in VIEWS:
                counts[operation] += 1
            return func(*args, **(kwargs or {}))

    totals = []
    for layers in (1, 2):
        counts = Counter()
        model = tiny(name, layers=layers)
        generation = Decode(model, PROMPTS)
        generation(torch.tensor([4, 5, 6]))  # packs
        embeddings = model.model.embed_tokens(torch.tensor([[4], [5], [6]]))
        with Counting():
            step(model.model, embeddings, generation.cache, generation.lengths, RUN)
        totals.append(counts)
    layer = totals[1] - totals[0]
    products = layer.pop("addmm", 0) + layer.pop("mm", 0)
    assert products == 4
    assert layer == {"add_rms_norm": 2, "qk_norm_rope_cached": 1, "gqa_decode": 1, "swiglu": 1}
    assert (totals[0] - layer).total() - products <= 4, totals[0]  # positions, table, first and last norm


@torch.no_grad()
def test_packs_follow_their_weights():
    model = tiny("Qwen2")
    Decode(model, PROMPTS)(torch.tensor([4, 5, 6]))
    model.model.layers[0].self_attn.k_proj.weight.mul_(-0.5)
    model.model.layers[0].mlp.up_proj.bias = None
    model.model.layers[0].mlp.gate_proj.weight.add_(0.3)
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        ours, theirs = Decode(model, PROMPTS), Upstream(model, PROMPTS)
        token = torch.tensor([4, 5, 6])
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours(token), theirs(token), rtol=20 * torch.finfo(dtype).eps, atol=atol)


def test_what_runs_upstream_instead():
    model = tiny("Qwen3").model
    assert unsupported(model) is None
    assert "float64" in unsupported(copy.deepcopy(model).double())
    assert "expected one of" in unsupported(torch.nn.Linear(2, 2))
    hooked, adapted, mixed, dynamic, gelu = (copy.deepcopy(model) for _ in range(5))
    hooked.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "hook" in unsupported(hooked)
    adapted.layers[0].self_attn.q_proj = torch.nn.Sequential(adapted.layers[0].self_attn.q_proj)
    assert "adapters" in unsupported(adapted)
    mixed.layers[0].input_layernorm.bfloat16()
    assert "one type" in unsupported(mixed)
    dynamic.rotary_emb.rope_type = "dynamic"
    assert "dynamic" in unsupported(dynamic)
    gelu.layers[0].mlp.act_fn = torch.nn.GELU()
    assert "GELU" in unsupported(gelu)
    with torch.inference_mode():
        assert "inference_mode" in unsupported(copy.deepcopy(model))


@torch.no_grad()
def test_a_cache_that_does_not_fit_is_refused():
    model = tiny("Qwen2", layers=2)
    past, _, lengths = prefill(model, PROMPTS)
    with pytest.raises(ValueError, match="9 to 8 tokens"):
        adopt(empty_cache(model.model, 3, 8), past, lengths)
    with pytest.raises(ValueError, match="rows"):
        adopt(empty_cache(model.model, 2, 16), past, lengths)
    with pytest.raises(ValueError, match="tuple"):
        adopt(empty_cache(model.model, 3, 16), (1, 2), lengths)
    with pytest.raises(ValueError, match="bfloat16"):
        adopt(empty_cache(tiny("Qwen2", layers=2).bfloat16().model, 3, 16), past, lengths)
    with pytest.raises(ValueError, match="1 layers"):
        adopt(empty_cache(tiny("Qwen2").model, 3, 16), past, lengths)
