"""attn_implementation="voxfuse": registered with transformers, and what it does with what kernels do not know."""

import importlib.util

import pytest
import torch

from voxfuse.fusions.gqa_attention import NAME, RECEIPT, attend, attention_function, register
from voxfuse.kernels._op import TALLIES, Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")


class Layer(torch.nn.Module):
    """What attention functions read of a self attention module."""

    def __init__(self, group):
        super().__init__()
        self.num_key_value_groups, self.is_causal = group, True


def case(rows=2, q_heads=4, kv_heads=2, tokens=1, keys=40, head_dim=16):
    q = torch.randn(rows, tokens, q_heads, head_dim).transpose(1, 2)
    k, v = (torch.randn(rows, kv_heads, keys, head_dim) for _ in range(2))
    return Layer(q_heads // kv_heads).eval(), q, k, v


def sdpa(*arguments, **kwargs):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(*arguments, **kwargs)[0]


@pytest.fixture
def run(request):
    return Run("interpreter", request.node.nodeid)


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("mask", [None, "boolean", "additive", "shared"])
def test_agrees_with_transformers_sdpa(mask, tokens, run):
    layer, q, k, v = case(tokens=tokens)
    if mask is not None:
        mask = (
            torch.rand(1 if mask == "shared" else 2, 1, tokens, 40) > 0.3
            if mask != "additive"
            else torch.randn(2, 1, tokens, 40)
        )
    result, weights = attend(layer, q, k, v, mask, run, scaling=0.3)
    torch.testing.assert_close(result, sdpa(layer, q, k, v, mask, scaling=0.3), rtol=1e-5, atol=1e-5)
    assert weights is None and result.is_contiguous()
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


def test_a_mask_longer_than_the_keys_is_cut(run):
    layer, q, k, v = case()
    mask = torch.rand(2, 1, 1, 64) > 0.3
    result, _ = attend(layer, q, k, v, mask, run)
    torch.testing.assert_close(result, sdpa(layer, q, k, v, mask[..., :40]), rtol=1e-5, atol=1e-5)


def test_weights_come_from_the_eager_chain_and_are_counted(run):
    from transformers.models.llama.modeling_llama import eager_attention_forward

    layer, q, k, v = case(tokens=5, keys=5)
    causal = torch.zeros(5, 5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)[None, None]
    expected = eager_attention_forward(layer, q, k, v, causal, scaling=0.25)
    for mask in (None, causal, causal == 0):
        result, weights = attend(layer, q, k, v, mask, run, output_attentions=True)
        torch.testing.assert_close(result, expected[0])
        torch.testing.assert_close(weights, expected[1])
    assert dict(TALLIES.of(run.receipt).fallbacks) == {"output_attentions: the weights are asked for": 3}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"dropout": 0.5}, "dropout is on"), ({"position_bias": torch.randn(1, 4, 1, 40)}, "position_bias is given")],
)
def test_what_kernels_do_not_know_runs_upstream(arguments, reason, run):
    layer, q, k, v = case()
    torch.manual_seed(3)
    expected = sdpa(layer, q, k, v, None, **arguments)
    torch.manual_seed(3)
    assert torch.equal(attend(layer, q, k, v, None, run, **arguments)[0], expected)
    (found,) = TALLIES.of(run.receipt).fallbacks
    assert reason in found


def test_a_model_runs_with_it_by_name():
    from transformers import LlamaConfig, LlamaForCausalLM

    register("reference")
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    upstream = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    model = LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()
    model.load_state_dict(upstream.state_dict())
    ids = torch.randint(0, 30, (2, 7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        baseline = upstream(ids, attention_mask=mask).logits
        before = TALLIES.of(RECEIPT).calls
        found = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask.bool()], baseline[mask.bool()], rtol=1e-4, atol=1e-5)
    assert TALLIES.of(RECEIPT).calls - before == 2
    assert attention_function(Run("reference", "x")).__name__ == "voxfuse_attention_forward"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "shared", "of each row"])
def test_prefill_on_a_gpu_never_falls_to_math_unseen(mask, dtype):
    layer, q, k, v = (x.cuda() for x in case(q_heads=14, kv_heads=2, tokens=200, keys=200, head_dim=64))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if mask is not None:
        mask = torch.ones(1 if mask == "shared" else 2, 1, 200, 200, device="cuda", dtype=torch.bool).tril()
    run = Run("triton", f"prefill {mask} {dtype}")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        result, _ = attend(layer, q, k, v, mask, run)
    expected = sdpa(layer, q, k, v, mask)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert not TALLIES.of(run.receipt).fallbacks
