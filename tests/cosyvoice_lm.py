"""The real Qwen2LM of CosyVoice2 (``cosyvoice-minicpmo``) over transformers' Qwen2, small and random.

With transformers 4.53 or newer upstream's loop hides all keys but the first (its mask is of one
element); ``whole_masks`` lets such a mask mean there what it means in the releases that upstream was written for.
"""

import functools
import importlib
import importlib.util
import sys

import hift_classes
import pytest
import torch

from voxfuse.e2e.stacks._cosyvoice_lm import synthetic
from voxfuse.patches._cosyvoice_lm import load_language_model

SPEECH_TOKENS = 40
SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def importable():
    """The module of Qwen2LM, or None where the distribution or transformers is absent."""
    if any(importlib.util.find_spec(name) is None for name in ("cosyvoice", "transformers")):
        return None
    module = load_language_model()
    hift_classes.importable("cosyvoice2")  # the stack is loaded as a whole
    return module


def upstream():
    """The module of Qwen2LM, or the test is skipped."""
    module = importable()
    if module is None:
        pytest.skip("cosyvoice-minicpmo or transformers is absent")
    return module


def language_model(speech_tokens=SPEECH_TOKENS, sampling=None, spread=0.2, device="cpu", **changes):
    """A Qwen2LM with random weights; ``sampling``: settings of ras_sampling, or a function of its signature.

    ``spread``: of the noise that is added to upstream's initial weights.
    """
    module = upstream()
    if not callable(sampling):
        sampling = functools.partial(sys.modules["cosyvoice.utils.common"].ras_sampling, **(sampling or {}))
    model = synthetic(module, SMALL | changes, speech_tokens, sampling, device).eval()
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return model


def greedy(scores, decoded, sampling):
    """The most probable token that is not one of the three stops, in the signature of ``ras_sampling``."""
    return scores[:-3].argmax(dim=-1, keepdim=True)


def speak(model, text=(3, 9, 4, 1, 5), prompt=(7, 2), speech=(11, 12, 13), seed=5, ratios=(60, 60), device=None):
    """The generator of upstream's ``inference``; ``ratios``: fewest and most speech tokens for a token of text."""
    device = device or model.llm_decoder.weight.device

    def ids(values):
        return torch.tensor([list(values)], dtype=torch.int64, device=device)

    def count(values):
        return torch.tensor([len(values)], dtype=torch.int32, device=device)

    torch.manual_seed(seed)
    return model.inference(
        ids(text), count(text), ids(prompt), count(prompt), ids(speech), count(speech),
        torch.zeros(0, 192, device=device), min_token_text_ratio=ratios[0], max_token_text_ratio=ratios[1],
    )  # fmt: skip


def speak_bistream(model, pieces, prompt=(7, 2), speech=(), seed=5):
    """The generator of upstream's ``inference_bistream`` over pieces of text."""
    device = model.llm_decoder.weight.device
    text = (torch.tensor([list(piece)], dtype=torch.int64, device=device) for piece in pieces)
    torch.manual_seed(seed)
    return model.inference_bistream(
        text, torch.tensor([list(prompt)], dtype=torch.int64, device=device), torch.tensor([len(prompt)]),
        torch.tensor([list(speech)], dtype=torch.int64, device=device), torch.tensor([len(speech)]),
        torch.zeros(0, 192, device=device),
    )  # fmt: skip


def whole_masks(monkeypatch):
    """Let transformers and voxfuse read a mask of ones that is too short as transformers before 4.53 does."""
    from transformers import DynamicCache

    from voxfuse.patches import _decoding

    if not _decoding.pads_short_masks():
        return
    monkeypatch.setattr(_decoding, "pads_short_masks", lambda: False)
    qwen2 = importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    make_mask = qwen2.create_causal_mask

    def create_causal_mask(**arguments):
        mask = arguments.get("attention_mask")
        short = mask is not None and mask.dim() == 2 and mask.shape[1] == 1
        return make_mask(**(arguments | {"attention_mask": None if short else mask}))

    monkeypatch.setattr(qwen2, "create_causal_mask", create_causal_mask)
    if not hasattr(DynamicCache, "__getitem__"):  # transformers 5; upstream's bistream asks cache[0][0] for its length
        get = lambda self, index: (self.layers[index].keys, self.layers[index].values)  # noqa: E731
        monkeypatch.setattr(DynamicCache, "__getitem__", get, raising=False)
