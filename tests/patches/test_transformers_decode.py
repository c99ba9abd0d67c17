"""One-token steps of transformers' real decoders from captured sessions, on upstream's own cache objects."""

import copy
import gc
import importlib.util

import pytest
import torch
from decoders import tiny
from fake_arena import FakeArena
from generating import continued, counted, generate, patched, prompt, record_graphs

import voxfuse
from voxfuse.fusions import decode_cache, decode_step

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is absent")

NAMES = ("Qwen2", "Qwen3", "Llama")


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    return record_graphs(monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{"max_new_tokens": 270}, {"do_sample": True, "top_p": 0.9, "rows": 2}])
def test_generate_gives_upstreams_tokens(name, options, graphs):
    options = dict(options)
    model, ids = tiny(name, layers=2, implementation="sdpa"), prompt(options.pop("rows", 1))
    expected = generate(model, ids, **options)
    with patched() as patches:
        with voxfuse.capturing():
            assert torch.equal(generate(model, ids, **options), expected)
        assert torch.equal(generate(model, ids, **options), expected)
        steps = 2 * (options.get("max_new_tokens", 40) - 1)
        assert counted(patches) == (steps * 11, {})
        (used,) = (each for each in graphs if len(each._runners))
        statistics = used.runner(model.model).statistics
        assert (statistics.replays, statistics.misses) == (steps, {})
    assert torch.equal(generate(model, ids, **options), expected)


def test_one_model_among_two_beside_its_fused_layers():
    model, other, ids = tiny("Qwen3", implementation="sdpa"), tiny("Qwen3", implementation="sdpa"), prompt()
    expected = generate(model, ids)
    with voxfuse.apply_patches(model, policy="all", backend="reference") as patches, voxfuse.capturing():
        assert torch.equal(generate(model, ids), expected)
        assert counted(patches) == (39 * 6, {})
        assert torch.equal(generate(other, ids), expected)
        assert counted(patches) == (39 * 6, {})
        assert torch.equal(generate(copy.deepcopy(model), ids), expected)


def cropped(past):
    try:
        past.crop(-2)
    except ValueError:
        past.crop(past.get_seq_length() - 2)
    return past


def reordered(past):
    past.reorder_cache(torch.tensor([0]))
    return past


@pytest.mark.parametrize("change", [cropped, reordered, copy.deepcopy, lambda past: past])
def test_whatever_becomes_of_a_cache_between_two_tokens(change):
    model = tiny("Qwen2", layers=2, implementation="sdpa")
    expected, held = continued(model, change)
    with patched() as patches, voxfuse.capturing():
        found, past = continued(model, change)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(tensors(past), tensors(held), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert past.get_seq_length() == held.get_seq_length()
        calls, fallbacks = counted(patches)
    assert fallbacks == ({decode_cache.REORDERED: 4} if change is reordered else {})
    assert calls == (4 if change is reordered else 8) * 11


def tensors(past):
    from voxfuse.fusions.decode_step import tensors

    return tensors(past)


def test_a_cache_that_is_kept_is_not_written_by_the_next_generation():
    model = tiny("Llama", layers=2, implementation="sdpa")
    with patched(), voxfuse.capturing():
        _, past = continued(model)
        before = [tensor.clone() for tensor in tensors(past)]
        continued(model)
        assert all(map(torch.equal, tensors(past), before)) and len(FakeArena.made) == 2
        views = tensors(past)[:1]
        del past
        gc.collect()
        continued(model)
        continued(model)
        assert torch.equal(views[0], before[0]) and len(FakeArena.made) == 2, "a lane was reused, or not reused"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])}, "rows are padded"),
        ({"num_beams": 2, "max_new_tokens": 6}, "as beam search does"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is on"),
        ({"cache_implementation": "static"}, "StaticCache"),
    ],
)
def test_what_generate_leaves_to_upstream_is_counted(options, reason):
    model, ids = tiny("Qwen2", implementation="sdpa"), prompt(2)
    first = lambda found: found if isinstance(found, torch.Tensor) else found.sequences  # noqa: E731
    expected = first(generate(model, ids, **options))
    with patched() as patches, voxfuse.capturing():
        assert torch.equal(first(generate(model, ids, **options)), expected)
        calls, fallbacks = counted(patches)
    assert len(fallbacks) == 1 and reason in next(iter(fallbacks)), fallbacks
    assert calls == (6 if "num_beams" in options else 0)  # nobody knows of a beam search before its first reordering


def test_gradients_attentions_and_foreign_classes_run_upstream(monkeypatch):
    import transformers

    model = tiny("Llama")  # eager attention
    past = model(prompt(), use_cache=True).past_key_values
    with patched() as patches:
        out = model(torch.tensor([[7]]), past_key_values=past, use_cache=True)
        out.logits.sum().backward()
        assert model.model.norm.weight.grad is not None
        with torch.no_grad():
            out = model(torch.tensor([[7]]), past_key_values=past, use_cache=True, output_attentions=True)
            assert out.attentions[0].shape[-1] == 7
            norm = transformers.models.llama.modeling_llama.LlamaRMSNorm
            monkeypatch.setattr(norm, "forward", lambda self, x: x)
            model(torch.tensor([[7]]), past_key_values=past, use_cache=True)
        calls, fallbacks = counted(patches)
    assert not calls and [*fallbacks.values()] == [1, 1, 1]
    gradient, attentions, foreign = fallbacks
    assert "gradient" in gradient and attentions == "output_attentions is on" and "already patched" in foreign


@torch.no_grad()
def test_a_cache_that_was_changed_and_cannot_be_taken_over_again():
    model = tiny("Qwen2", layers=2, implementation="sdpa")
    hooks = []

    def change(past):
        hooks.append(model.model.layers[0].mlp.register_forward_hook(lambda *_: None))
        return cropped(past)

    expected, _ = continued(model, change)
    hooks.pop().remove()
    with patched() as patches, voxfuse.capturing():
        found, _ = continued(model, change)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        calls, fallbacks = counted(patches)
    assert calls == 4 * 11 and list(fallbacks.values()) == [4] and "layers.0.mlp has a hook" in next(iter(fallbacks))


def test_memory_that_lacks_for_a_longer_cache(monkeypatch):
    model, ids = tiny("Qwen2", layers=2, implementation="sdpa"), prompt()
    expected = generate(model, ids, max_new_tokens=270)
    empty = decode_step.empty_cache

    def lacking(decoder, rows, capacity):
        if capacity > 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more")
        return empty(decoder, rows, capacity)

    monkeypatch.setattr(decode_step, "empty_cache", lacking)
    with patched() as patches, voxfuse.capturing():
        assert torch.equal(generate(model, ids, max_new_tokens=270), expected)
        _, fallbacks = counted(patches)
    longer, again = fallbacks
    assert longer == "no memory for a longer cache: CUDA out of memory" and fallbacks[longer] == 1
    assert again == "no memory for a static cache: CUDA out of memory" and fallbacks[again] == 269 - 251 - 1


def test_new_weights_are_captured_again():
    model, ids = tiny("Qwen2", implementation="sdpa"), prompt()
    with patched() as patches, voxfuse.capturing():
        generate(model, ids)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1)
        found = generate(model, ids)
        with patches.paused():
            expected = generate(model, ids)
    assert torch.equal(found, expected) and len(FakeArena.made) == 2
