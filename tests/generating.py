"""``generate`` and forced tokens of transformers' decoders, untouched and with captured steps on the CPU."""

import torch
from fake_arena import FakeArena

import voxfuse
from voxfuse.fusions import decode_cache
from voxfuse.patches import _decoding


def record_graphs(monkeypatch):
    """Captures into a fake arena on the CPU; gives the CachedDecoding of each patch made since."""
    FakeArena.made, FakeArena.fail, made = [], None, []

    class Recorded(decode_cache.CachedDecoding):
        def __init__(self, *args, **options):
            super().__init__(*args, arena=FakeArena, **options)
            made.append(self)

    monkeypatch.setattr(_decoding, "CachedDecoding", Recorded)
    return made


def patched(target="transformers"):
    return voxfuse.apply_patches(target, include=["decode_graph"], backend="reference")


def counted(patches):
    """Calls of fused operations, and fallbacks, of all decoders."""
    receipts = [each for each in patches.receipts if each.fusion == "decode_graph" and each.status == "applied"]
    fallbacks = {reason: count for each in receipts for reason, count in each.fallbacks.items()}
    return sum(each.calls for each in receipts), fallbacks


def prompt(rows=1, tokens=5):
    return torch.randint(3, 50, (rows, tokens), generator=torch.Generator().manual_seed(1))


def generate(model, ids, **options):
    torch.manual_seed(3)
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, **options)


@torch.no_grad()
def continued(model, change=lambda past: past, steps=4):
    """Logits of a few forced tokens behind a prompt, of the same with the cache changed in between, and the cache."""
    past = model(prompt(), use_cache=True).past_key_values
    logits = []
    for index in range(2 * steps):
        if index == steps:
            past = change(past)
        token = torch.tensor([[7 + index]])
        logits.append(model(token, past_key_values=past, use_cache=True).logits)
    return torch.cat(logits, 1), past
