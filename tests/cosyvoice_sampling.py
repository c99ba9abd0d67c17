"""CosyVoice's sampling functions as they are defined, for tests: cosyvoice/utils/common.py of FunAudioLLM/CosyVoice,
commit ace7c47f; without ``exclude`` as in older releases (07352a50)."""

import torch


def nucleus_size(probabilities, top_p, top_k):
    """How many of the sorted probabilities are added until they reach top_p or are top_k."""
    total, size = 0.0, 0
    for value in probabilities:
        if not (total < top_p and size < top_k):
            break
        total += value
        size += 1
    return size


def nucleus_sampling(scores, top_p, top_k):
    values, indices = scores.softmax(dim=0).sort(descending=True, stable=True)
    size = nucleus_size(values, top_p, top_k)
    return indices[values[:size].multinomial(1, replacement=True)].item()


def ras_sampling(scores, decoded, top_p=0.8, top_k=25, win_size=10, tau_r=0.1, exclude=True):
    token = nucleus_sampling(scores, top_p, top_k)
    repeats = (torch.tensor(decoded[-win_size:]).to(scores.device) == token).sum().item()
    if repeats >= win_size * tau_r:
        if exclude:
            scores = scores.clone()
            scores[token] = -float("inf")
        token = scores.softmax(dim=0).multinomial(1, replacement=True).item()
    return token
