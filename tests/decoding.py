"""Generations token by token: through ``decode_step`` and through upstream's own forward; which products are skinny."""

import torch
from decoders import prefill

from voxfuse.fusions.decode_step import adopt, empty_cache, step

PROMPTS = [[3, 9, 4, 1, 5], [7, 2], [11, 12, 13, 14, 15, 16, 17, 18, 19]]


class Choice(dict):
    """MOST_ROWS that takes skinny_gemm for the products that ``wanted`` names by (GPU, operation, type, N, K)."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted = wanted

    def get(self, key, default=0):
        return 16 if self.wanted(*key) else default


def generation(model, run, prompts=PROMPTS, capacity=256):
    """A function that decodes one token of each row through ``step``: ids to logits [rows, vocabulary]."""
    past, _, lengths = prefill(model, prompts)
    cache = empty_cache(model.model, len(prompts), capacity)
    adopt(cache, past, lengths)
    lengths = torch.tensor(lengths, device=model.device)

    def decode(ids):
        logits = step(model.model, model.model.embed_tokens(ids.view(-1, 1)), cache, lengths, run, head=model.lm_head)
        lengths.add_(1)
        return logits[:, 0]

    return decode


def upstream(model, prompts=PROMPTS):
    """The same through the model's own forward, each row by itself."""
    pasts = [prefill(model, [prompt])[0] for prompt in prompts]

    def decode(ids):
        rows = zip(ids.view(-1, 1, 1), pasts, strict=True)
        return torch.cat([model(i, past_key_values=past, use_cache=True).logits[:, -1] for i, past in rows])

    return decode


def error(value, oracle):
    return ((value.double() - oracle).norm() / oracle.norm()).item()
