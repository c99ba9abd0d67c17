"""The driver's T3 stage on Chatterbox's real class: forced lengths, times, seeds, folders."""

import chatterbox_t3
import pytest
import torch
from safetensors.torch import save_file

import voxfuse
from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.stacks._chatterbox_t3 import ChatterboxT3
from voxfuse.e2e.weights.cache import WeightsCorrupt


@pytest.fixture
def stage():
    chatterbox_t3.upstream()
    stage = ChatterboxT3(chatterbox_t3.SMALL)
    with pytest.raises(RuntimeError, match="load"):
        _ = stage.model
    stage.load("cpu")
    return stage


def test_forced_lengths_seeds_and_times(stage):
    text = stage.encode("Hello")
    state = torch.get_rng_state()
    spoken = stage.speak(text, seed=3, count=31)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(spoken.tokens) == len(spoken.after_s) == 31 and spoken.after_s == sorted(spoken.after_s)
    assert 0 < spoken.stages["lm prefill"] < spoken.first_chunk_s < spoken.after_s[-1]
    assert stage.speak(text, seed=3, count=31).tokens == spoken.tokens
    assert stage.speak(text, seed=4, count=31).tokens != spoken.tokens
    with pytest.raises(ValueError, match="at least one token"):
        stage.speak([], seed=3)


def test_patched_tokens_are_untouched_ones(stage):
    text = stage.encode("A longer text.")
    expected = stage.speak(text, seed=3, count=60).tokens
    with voxfuse.apply_patches("chatterbox", include=["decode_graph"], backend="reference") as patches:
        assert stage.speak(text, seed=3, count=60).tokens == expected
        calls = [receipt.calls for receipt in patches.receipts if receipt.fusion == "decode_graph"]
    assert calls == [60 * 16]


def test_a_folder_as_upstream_releases_it(stage, tmp_path, monkeypatch):
    with pytest.raises(WeightsMissing, match="t3_cfg"):
        ChatterboxT3().load("cpu", tmp_path)
    save_file(dict(stage.model.state_dict()), tmp_path / "t3_cfg.safetensors")
    torch.save({"t3": {"speaker_emb": torch.ones(1, 256)}}, tmp_path / "conds.pt")
    (tmp_path / "tokenizer.json").write_text("{}")
    configs = stage._module.LLAMA_CONFIGS
    monkeypatch.setitem(configs, "Llama_520M", configs["Llama_520M"] | chatterbox_t3.SMALL)
    with pytest.raises(WeightsCorrupt, match="perceiver"):  # ours has none
        ChatterboxT3().load("cpu", tmp_path)
