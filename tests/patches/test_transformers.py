"""The decoder patches on transformers' real Qwen2, Qwen3 and Llama with tiny random weights."""

import copy
import importlib.util

import pytest
import torch

import voxfuse

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")

LAYERS = {"include": ["rms_norm", "swiglu", "gqa_attention"], "policy": "all"}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def tiny(name, implementation="sdpa", **changes):
    import transformers

    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    config._attn_implementation = implementation
    torch.manual_seed(11)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms that are not one, and attention that is not flat
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def run_model(model, new_tokens=3, padded=True):
    """Logits of a left-padded prompt of two rows and of a few decode steps, all joined."""
    torch.manual_seed(5)
    ids = torch.randint(3, 50, (2, 6))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    cache, logits = None, []
    for _ in range(1 + new_tokens):
        out = model(ids, attention_mask=mask, use_cache=True, **({} if cache is None else {"past_key_values": cache}))
        cache = out.past_key_values
        logits.append(out.logits[:, -1])
        ids = out.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return torch.stack(logits)


def calls(patches):
    return {receipt.target.rpartition(":")[2]: receipt.calls for receipt in patches.receipts if receipt.calls}


def fallbacks(patches):
    return [reason for receipt in patches.receipts for reason in receipt.fallbacks]


@pytest.mark.parametrize(
    ("backend", "padded", "steps"), [("reference", False, 4), ("reference", True, 4), ("interpreter", True, 2)]
)
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Llama"])
def test_logits_agree_by_class_and_come_back_on_revert(name, backend, padded, steps):
    model = tiny(name)
    baseline = run_model(model, steps - 1, padded)
    with voxfuse.apply_patches("transformers", **LAYERS, backend=backend) as patches:
        torch.testing.assert_close(run_model(model, steps - 1, padded), baseline, rtol=1e-4, atol=1e-5)
        assert calls(patches) == {
            f"{name}RMSNorm.forward": 3 * steps,  # those of Qwen3's heads are fused into the attention
            f"{name}MLP.forward": steps,
            f"{name}Attention.forward": 2 * steps,  # norm and rope, attention
        }
        assert not fallbacks(patches)
    assert torch.equal(run_model(model, steps - 1, padded), baseline), "revert did not restore upstream"


def test_one_model_among_two():
    patched, other = tiny("Qwen2"), tiny("Qwen2")
    baseline = run_model(other)
    with voxfuse.apply_patches(patched, **LAYERS, backend="reference") as patches:
        torch.testing.assert_close(run_model(patched), baseline, rtol=1e-4, atol=1e-5)
        counted = calls(patches)
        assert len(counted) == 3
        assert torch.equal(run_model(other), baseline)
        assert calls(patches) == counted, "the other model was patched"
        torch.testing.assert_close(run_model(copy.deepcopy(patched)), baseline, rtol=1e-4, atol=1e-5)
        assert calls(patches) != counted, "a copy lost its patches"


def test_never_by_default():
    model = tiny("Llama")
    baseline = run_model(model)
    with voxfuse.apply_patches(**LAYERS, backend="reference") as patches:
        assert not any(receipt.stack == "transformers" for receipt in patches.receipts)
        assert torch.equal(run_model(model), baseline)


def test_bf16_is_as_near_to_fp64_as_upstream(same_precision_logits):
    model = tiny("Qwen3")
    exact = run_model(copy.deepcopy(model).double(), new_tokens=0)
    half = model.bfloat16()
    eager = run_model(half, new_tokens=0)
    with voxfuse.apply_patches(half, **LAYERS, backend="interpreter"):
        same_precision_logits(run_model(half, new_tokens=0), eager, exact)


@pytest.fixture
def same_precision_logits():
    def check(value, eager, oracle):
        errors = [((x.double() - oracle).norm() / oracle.norm()).item() for x in (value, eager)]
        assert errors[0] <= 1.25 * errors[1], f"{errors[0]:.2e} against eager's {errors[1]:.2e}"

    return check


def test_generation_gives_the_same_tokens():
    model = tiny("Qwen2")
    ids = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    arguments = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    baseline = model.generate(ids, **arguments)
    with voxfuse.apply_patches(model, **LAYERS, backend="reference") as patches:
        assert torch.equal(model.generate(ids, **arguments), baseline)
        assert torch.equal(model.generate(ids, cache_implementation="static", **arguments), baseline)
        assert not fallbacks(patches)


def test_attention_weights_are_still_to_be_had():
    model = tiny("Llama", implementation="eager")
    ids = torch.randint(3, 50, (1, 5))
    with torch.no_grad():
        baseline = model(ids, output_attentions=True)
        with voxfuse.apply_patches(model, **LAYERS, backend="reference") as patches:
            found = model(ids, output_attentions=True)
            for mine, upstream in zip(found.attentions, baseline.attentions, strict=True):
                torch.testing.assert_close(mine, upstream, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(found.logits, baseline.logits, rtol=1e-4, atol=1e-5)
            assert "attn_implementation=eager runs upstream's attention" in fallbacks(patches)


def test_an_activation_other_than_silu_runs_upstream_and_says_so():
    model = tiny("Llama", hidden_act="gelu")
    baseline = run_model(model)
    with voxfuse.apply_patches(model, **LAYERS, backend="reference") as patches:
        torch.testing.assert_close(run_model(model), baseline, rtol=1e-4, atol=1e-5)
        assert any("expected SiLU" in reason for reason in fallbacks(patches))


def test_training_still_trains():
    model = tiny("Qwen3")
    ids = torch.randint(3, 50, (1, 5))
    model(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    with voxfuse.apply_patches(model, **LAYERS, backend="interpreter") as patches:
        model(ids, labels=ids).loss.backward()
        assert any("gradient" in reason for reason in fallbacks(patches))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6)
