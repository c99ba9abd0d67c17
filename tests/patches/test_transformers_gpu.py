"""The decoder patches on a GPU at real widths: as near to fp64 as upstream, nothing fell back, tokens agree."""

import copy

import pytest
import torch

import voxfuse
from voxfuse.patches._transformers_sources import SOURCES
from voxfuse.patches.guards import installed_version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(
        installed_version("transformers") not in SOURCES, reason="needs a release of transformers with patches"
    ),
]

WIDTHS = {  # hidden, intermediate, query heads, kv heads
    "Qwen2": (896, 4864, 14, 2),
    "Qwen3": (1024, 3072, 16, 8),
    "Llama": (1024, 4096, 16, 16),
}
STEPS = 4
LAYERS = ["rms_norm", "swiglu", "gqa_attention"]


def model_of(name):
    import transformers

    hidden, intermediate, q_heads, kv_heads = WIDTHS[name]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=500, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2,
        num_attention_heads=q_heads, num_key_value_heads=kv_heads, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().cuda()


@torch.no_grad()
def logits(model, prompt, following):
    """Of a left-padded prompt of two rows, then of a few forced tokens over the growing cache."""
    mask = torch.ones_like(prompt)
    mask[0, :50] = 0
    out = model(prompt, attention_mask=mask, use_cache=True)
    found = [out.logits[:, 60:].flatten(0, 1)]
    for token in following.T:
        mask = torch.cat([mask, mask[:, -1:]], dim=1)
        out = model(token[:, None], attention_mask=mask, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits[:, -1])
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", WIDTHS)
def test_as_near_to_fp64_as_upstream(name, dtype):
    model = model_of(name).to(dtype)
    prompt, following = (torch.randint(3, 500, (2, count), device="cuda") for count in (300, STEPS))
    exact = logits(copy.deepcopy(model).double(), prompt, following)
    eager = logits(model, prompt, following)
    with voxfuse.apply_patches(model, include=LAYERS) as patches:
        found = logits(model, prompt, following)
        applied = [receipt for receipt in patches.receipts if receipt.status == "applied"]
        assert {receipt.fusion for receipt in applied} == set(LAYERS)
        assert all(receipt.calls and not receipt.fallbacks for receipt in applied), patches.report()
    errors = [((value.double() - exact).norm() / exact.norm()).item() for value in (found, eager)]
    assert errors[0] <= 1.25 * errors[1], f"error {errors[0]:.2e}, eager's {errors[1]:.2e}"
    assert torch.equal(logits(model, prompt, following), eager), "revert did not restore upstream"


@pytest.mark.parametrize("fusions", [LAYERS, ["decode_graph"]])
def test_greedy_tokens_in_fp32_agree(fusions):
    model = model_of("Qwen2")
    prompt = torch.randint(3, 500, (1, 20), device="cuda")
    arguments = {"max_new_tokens": 64, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    baseline = model.generate(prompt, **arguments)
    with voxfuse.apply_patches(model, include=fusions) as patches, voxfuse.capturing():
        for _ in range(2):
            assert torch.equal(model.generate(prompt, **arguments), baseline)
        applied = [receipt for receipt in patches.receipts if receipt.status == "applied"]
        assert all(receipt.calls and not receipt.fallbacks for receipt in applied), patches.report()
