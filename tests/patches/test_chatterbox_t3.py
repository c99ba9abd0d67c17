"""The patch of Chatterbox's T3 on its real class: upstream's tokens, and attention maps where they are read."""

import chatterbox_t3
import pytest
import torch
from chatterbox_t3 import speak, text_to_speech_tokens
from fake_arena import FakeArena
from generating import record_graphs

import voxfuse
from voxfuse.fusions import decode_cache
from voxfuse.patches import _chatterbox_t3, _decoding

OPS = 16  # fused operations of a step of three layers


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    chatterbox_t3.upstream()
    record_graphs(monkeypatch)


def patched(target="chatterbox"):
    return voxfuse.apply_patches(target, include=["decode_graph"], backend="reference")


def receipt(patches):
    (found,) = (each for each in patches.receipts if each.stack == "chatterbox" and each.fusion == "decode_graph")
    return found


def test_two_hundred_and_fifty_tokens_are_upstreams(monkeypatch):
    model = text_to_speech_tokens(monkeypatch)
    expected = speak(model, 250)
    assert len(expected) == 250 and len(set(expected)) > 50
    with patched() as patches, voxfuse.capturing():
        for _ in range(2):
            assert speak(model, 250) == expected
        found = receipt(patches)
        assert (found.status, found.calls, found.fallbacks) == ("applied", 2 * 250 * OPS, {})
        assert len(FakeArena.made) == 2  # 256 and 512 tokens, of two rows each
    assert speak(model, 250) == expected


def test_a_model_instance_is_told_to_be_patched_by_name(monkeypatch):
    model = text_to_speech_tokens(monkeypatch)
    speak(model, 3)  # leaves a backend of this generation in the model
    with patched(model) as patches:
        found = receipt(patches)
        assert found.status == "skipped" and "by name" in found.reason


def test_greedy_without_guidance(monkeypatch):
    model = text_to_speech_tokens(monkeypatch)
    options = {"cfg_weight": 0.0, "temperature": 1e-4, "min_p": 0.0, "top_p": 1.0}
    expected = speak(model, **options)
    with patched() as patches, voxfuse.capturing():
        assert speak(model, **options) == expected and receipt(patches).calls == 40 * OPS


def test_the_alignment_analyser_still_sees_attention_maps(monkeypatch):
    model = text_to_speech_tokens(monkeypatch, multilingual=True)
    expected = speak(model, 12)
    aligned = model.patched_model.alignment_stream_analyzer.alignment
    with patched() as patches, voxfuse.capturing():
        assert speak(model, 12) == expected
        found = receipt(patches)
        assert not found.calls and found.fallbacks == {_chatterbox_t3.ANALYSED: len(expected)}
    again = model.patched_model.alignment_stream_analyzer.alignment
    assert again.shape[0] >= 3 and torch.equal(again, aligned)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_tokens_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_decoding, "CachedDecoding", decode_cache.CachedDecoding)
    model = text_to_speech_tokens(monkeypatch).cuda()
    expected = speak(model, 250)
    with voxfuse.apply_patches("chatterbox", include=["decode_graph"]) as patches, voxfuse.capturing():
        for _ in range(2):
            assert speak(model, 250) == expected
        assert (receipt(patches).calls, receipt(patches).fallbacks) == (2 * 250 * OPS, {})
