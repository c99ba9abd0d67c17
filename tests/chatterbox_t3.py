"""The real T3 of Chatterbox (``chatterbox-tts``) over transformers' Llama, small and random."""

import importlib.util
import sys

import hift_classes
import pytest
import torch

from voxfuse.e2e.stacks._chatterbox_t3 import load_t3, synthetic

SMALL = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}


def importable():
    """The module of T3, or None where the distribution or transformers is absent."""
    if any(importlib.util.find_spec(name) is None for name in ("chatterbox", "transformers")):
        return None
    module = load_t3()
    hift_classes.importable("chatterbox")  # the stack is loaded as a whole
    return module


def upstream():
    """The module of T3, or the test is skipped."""
    module = importable()
    if module is None:
        pytest.skip("chatterbox-tts or transformers is absent")
    return module


def text_to_speech_tokens(monkeypatch, multilingual=False, spread=0.2, **changes):
    """A T3 with random weights whose sizes are ``SMALL``, but for the changes.

    ``spread``: of the noise that is added to upstream's initial weights.
    """
    module = upstream()
    analyser = sys.modules["chatterbox.models.t3.inference.alignment_stream_analyzer"]
    monkeypatch.setattr(analyser, "LLAMA_ALIGNED_HEADS", [(1, 2), (2, 0)])
    model = synthetic(module, SMALL | changes, multilingual).eval()
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "speech_head.weight":  # which draws no end
                parameter.add_(spread * torch.randn_like(parameter))
    return model


def speak(model, tokens=40, seed=5, **options):
    """Speech tokens of upstream's ``inference``."""
    module = upstream()
    device = model.device
    text = torch.tensor([[model.hp.start_text_token, 3, 9, 4, 1, 5, model.hp.stop_text_token]] * 2, device=device)
    condition = module.T3Cond(
        speaker_emb=torch.linspace(-1, 1, model.hp.speaker_embed_size, device=device)[None],
        emotion_adv=0.5 * torch.ones(1, 1, 1, device=device),
    )
    torch.manual_seed(seed)
    return model.inference(t3_cond=condition, text_tokens=text, max_new_tokens=tokens, **options)[0].tolist()
