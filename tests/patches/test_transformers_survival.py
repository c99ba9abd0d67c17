"""What a patched decoder of transformers lives through: other types, files, ends at different steps, odd positions."""

import importlib.util

import pytest
import torch
from decoders import tiny
from generating import continued, counted, generate, patched, prompt, record_graphs

import voxfuse

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")

NAMES = ("Qwen2", "Qwen3", "Llama")


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    return record_graphs(monkeypatch)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_end_at_different_steps(name):
    model, ids = tiny(name, implementation="sdpa"), prompt(2)
    free = generate(model, ids)
    first, second = free[:, ids.shape[1] :].tolist()
    end = next(token for token in first[3:] if token not in second[:20])
    options = {"eos_token_id": end, "pad_token_id": 0}
    expected = generate(model, ids, **options)
    lengths = [int((row == end).int().cumsum(0).eq(0).sum()) for row in expected[:, ids.shape[1] :]]
    assert lengths[0] < lengths[1], "the rows were to end apart"
    with patched() as patches, voxfuse.capturing():
        assert torch.equal(generate(model, ids, **options), expected)
        calls, fallbacks = counted(patches)
    assert calls == 6 * (expected.shape[1] - ids.shape[1] - 1) and not fallbacks


@pytest.mark.parametrize("name", NAMES)
def test_a_type_that_changes_after_patching(name):
    model, ids = tiny(name, layers=2, implementation="sdpa"), prompt()
    tokens = generate(model, ids)
    half = tiny(name, layers=2, implementation="sdpa").bfloat16()
    exact = tiny(name, layers=2, implementation="sdpa").bfloat16().double()
    (eager, _), (true, _) = continued(half), continued(exact)
    with patched() as patches, voxfuse.capturing():
        assert torch.equal(generate(model, ids), tokens)
        before = counted(patches)[0]
        found, past = continued(model.bfloat16())
        assert past.get_seq_length() == 13 and counted(patches) == (before + 8 * 11, {})
    assert found.dtype == torch.bfloat16
    errors = [float((logits.double() - true).norm() / true.norm()) for logits in (found, eager)]
    assert errors[0] <= max(1.25 * errors[1], torch.finfo(torch.bfloat16).eps), errors


@pytest.mark.parametrize("by_instance", [False, True])
def test_a_patched_model_saved_and_loaded(by_instance, tmp_path):
    model, ids = tiny("Qwen2", implementation="sdpa"), prompt()
    expected, keys = generate(model, ids), list(model.state_dict())
    with patched(model if by_instance else "transformers") as patches, voxfuse.capturing():
        generate(model, ids)
        assert list(model.state_dict()) == keys
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        before, _ = counted(patches)
        assert torch.equal(generate(loaded, ids), expected)
        assert counted(patches)[0] - before == (0 if by_instance else 39 * 6)
    assert torch.equal(generate(type(model).from_pretrained(tmp_path).eval(), ids), expected)


@torch.no_grad()
def test_positions_that_are_not_the_number_of_tokens_run_upstream():
    model, token = tiny("Llama", implementation="sdpa"), torch.tensor([[7]])
    positions = {"position_ids": torch.tensor([[9]]), "use_cache": True}
    held = model(prompt(), use_cache=True).past_key_values
    expected = model(token, past_key_values=held, **positions).logits
    with patched() as patches:
        past = model(prompt(), use_cache=True).past_key_values
        found = model(token, past_key_values=past, **positions).logits
        calls, fallbacks = counted(patches)
    assert torch.equal(found, expected) and not calls
    assert list(fallbacks) == ["the position is not the number of tokens in the cache"]
