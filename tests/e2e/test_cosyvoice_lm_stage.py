"""The driver's language model stage on CosyVoice2's real class: forced lengths, times, seeds, folders."""

import json
from contextlib import nullcontext

import cosyvoice_lm
import pytest
import torch

import voxfuse
from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.stacks._cosyvoice_lm import CosyVoiceLM
from voxfuse.e2e.weights.cache import WeightsCorrupt
from voxfuse.patches import _decoding


@pytest.fixture
def stage(monkeypatch):
    cosyvoice_lm.upstream()
    cosyvoice_lm.whole_masks(monkeypatch)
    stage = CosyVoiceLM(cosyvoice_lm.SMALL, cosyvoice_lm.SPEECH_TOKENS)
    with pytest.raises(RuntimeError, match="load"):
        _ = stage.model
    stage.load("cpu")
    return stage


def test_forced_lengths_seeds_and_times(stage):
    text = stage.encode("Hello")
    state = torch.get_rng_state()
    spoken = stage.speak(text, seed=3, count=61, prompt_text=[5, 6], prompt_speech=[1, 2, 3])
    assert torch.equal(torch.get_rng_state(), state)
    assert len(spoken.tokens) == 61 and max(spoken.tokens) < cosyvoice_lm.SPEECH_TOKENS
    assert 0 < spoken.stages["lm prefill"] < spoken.first_chunk_s < spoken.after_s[-1]
    assert sum(spoken.stages.values()) == pytest.approx(spoken.after_s[-1])
    assert stage.speak(text, seed=3, count=61, prompt_text=[5, 6], prompt_speech=[1, 2, 3]).tokens == spoken.tokens
    assert stage.speak(text, seed=4, count=61, prompt_text=[5, 6], prompt_speech=[1, 2, 3]).tokens != spoken.tokens
    assert stage.speak(text, seed=3, count=1).first_chunk_s > 0
    for wrong in ({"text": []}, {"text": text, "count": 0}):
        with pytest.raises(ValueError, match="at least one token"):
            stage.speak(seed=3, **wrong)


def test_patched_tokens_are_untouched_ones(stage):
    text = stage.encode("A longer text.")
    expected = stage.speak(text, seed=3, count=200).tokens
    with voxfuse.apply_patches(stage.model, include=["decode_graph", "ras_sampling"], backend="reference") as patches:
        assert stage.speak(text, seed=3, count=200).tokens == expected
        calls = {receipt.fusion: receipt.calls for receipt in patches.receipts if receipt.calls}
    assert calls == {"decode_graph": 199 * 11}


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "reference"), pytest.param("cuda", "triton", marks=GPU)], ids=["cpu", "cuda"]
)
def test_requests_at_once_are_those_one_after_the_other(stage, device, backend):
    model = stage.model.to(device)
    model.sampling = cosyvoice_lm.greedy
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights hardly look at the text
            parameter.add_(0.2 * torch.randn_like(parameter))
    texts = [stage.encode(text) for text in ("One text.", "Another", "And a third one")]
    expected = [stage.speak(text, seed=3, count=50).tokens for text in texts]
    assert len({*map(tuple, expected)}) == 3
    with voxfuse.apply_patches(model, include=["decode_graph"], backend=backend) as patches:
        for _ in range(2 if device == "cuda" else 1):  # lanes for three at once, then all from graphs
            with voxfuse.capturing() if device == "cuda" else nullcontext():
                spoken = stage.speak_at_once(texts, seed=3, count=50)
            assert [each.tokens for each in spoken] == expected
        calls = sum(receipt.calls for receipt in patches.receipts if receipt.stack == "cosyvoice2")
        assert calls == (2 if device == "cuda" else 1) * 3 * 49 * 11


def test_a_folder_as_upstream_releases_it(stage, tmp_path):
    with pytest.raises(WeightsMissing, match="CosyVoice-BlankEN"):
        CosyVoiceLM().load("cpu", tmp_path)
    blank = tmp_path / "CosyVoice-BlankEN"
    stage.model.llm.model.save_pretrained(blank)
    config = json.loads((blank / "config.json").read_text())
    assert config["hidden_size"] == cosyvoice_lm.SMALL["hidden_size"]
    torch.save(stage.model.state_dict(), tmp_path / "llm.pt")
    with pytest.raises(WeightsCorrupt, match="llm_decoder"):  # 40 speech tokens, not 6561
        CosyVoiceLM().load("cpu", tmp_path)


def test_a_transformers_with_which_upstream_speaks_noise_is_refused(monkeypatch):
    cosyvoice_lm.upstream()
    monkeypatch.setattr(_decoding, "pads_short_masks", lambda: True)
    with pytest.raises(ImportError, match=r"transformers==4\.51\.3"):
        CosyVoiceLM().load("cpu")
