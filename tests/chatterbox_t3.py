"""The real T3 of Chatterbox (``chatterbox-tts``) over transformers' Llama, small and random.

The distribution is installed without what it depends on. Its ``__init__`` files, which import the whole stack, and
einops, of which T3 calls nothing without a perceiver, are stood in for.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

import hift_classes
import pytest
import torch

MODULE = "chatterbox.models.t3.t3"
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

RELEASED = {  # Llama_520M
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}


def importable():
    """The module of T3, or None where the distribution or transformers is absent."""
    if any(importlib.util.find_spec(name) is None for name in ("chatterbox", "transformers")):
        return None
    import transformers

    assert transformers.LlamaModel and transformers.GPT2Model  # before a stand-in that they would look at
    hift_classes.importable("chatterbox")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("einops") is None:
            einops = ModuleType("einops")
            einops.rearrange = None
            patch.setitem(sys.modules, "einops", einops)
        return importlib.import_module(MODULE)


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
    configs = sys.modules["chatterbox.models.t3.llama_configs"].LLAMA_CONFIGS
    monkeypatch.setitem(configs, "small", configs["Llama_520M"] | SMALL | changes)
    analyser = sys.modules["chatterbox.models.t3.inference.alignment_stream_analyzer"]
    monkeypatch.setattr(analyser, "LLAMA_ALIGNED_HEADS", [(1, 2), (2, 0)])
    settings = module.T3Config.multilingual() if multilingual else module.T3Config.english_only()
    settings.llama_config_name, settings.use_perceiver_resampler, settings.speaker_embed_size = "small", False, 16
    torch.manual_seed(11)
    model = module.T3(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
        model.speech_head.weight[settings.stop_speech_token].zero_()  # hardly an end before the length asked for
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
