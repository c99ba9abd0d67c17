"""Sampling against transformers' own processors and torch.multinomial, from the same seed."""

import importlib.util

import pytest
import torch

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.sampler import draw, reference, sample

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers")
VOCABULARY = 200
CASES = {  # temperature, top_k, top_p, penalty
    "plain": (1.0, 0, 1.0, 1.0),
    "temperature": (0.7, 0, 1.0, 1.0),
    "top-k": (1.0, 25, 1.0, 1.0),
    "top-k of more than there are": (1.0, 5000, 1.0, 1.0),
    "top-k of one": (1.3, 1, 1.0, 1.0),
    "top-p": (1.0, 0, 0.8, 1.0),
    "tiny top-p": (1.0, 0, 1e-4, 1.0),
    "all": (0.8, 50, 0.9, 1.3),
    "penalty below one": (1.0, 0, 0.95, 0.8),
}


def upstream(logits, ids, temperature, top_k, top_p, penalty):
    """Processed scores [rows, vocabulary] as ``generate`` makes them."""
    import transformers

    scores = logits.to(torch.float32)
    processors = [transformers.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1.0 else []
    processors += [transformers.TemperatureLogitsWarper(temperature)]
    processors += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    processors += [transformers.TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def case(rows, device, dtype=torch.float32, spread=4.0):
    logits = (spread * torch.randn(rows, VOCABULARY)).to(device, dtype)
    ids = torch.randint(0, VOCABULARY, (rows, 60), device=device)
    return logits, ids, torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)


@needs_transformers
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_tokens_are_those_of_transformers_under_the_same_seed(settings, device, run, poisoned_empty):
    logits, ids, seen = case(8, device)
    probabilities = upstream(logits, ids, *settings).softmax(dim=-1)
    torch.manual_seed(3)
    expected = torch.multinomial(probabilities, num_samples=1)[:, 0]
    torch.manual_seed(3)
    noise = draw(logits)
    given = seen if settings[3] != 1.0 else None
    assert torch.equal(reference(logits, given, noise, *settings), expected)
    token = sample(logits, given, noise, *settings, run=run)
    assert token.dtype == torch.int64 and torch.equal(token, expected)
    assert not TALLIES.of(run.receipt).fallbacks


@needs_transformers
@pytest.mark.parametrize("settings", [CASES["all"], CASES["top-p"], CASES["top-k"]])
def test_what_stays_is_what_transformers_keeps(settings, device, run):
    """Noise that favours one token each: a kept one is chosen, one that left is not."""
    logits, ids, seen = case(1, device, spread=1.0)
    scores = upstream(logits, ids, *settings)[0]
    kept = int((scores > -torch.inf).sum())
    assert 3 < kept < VOCABULARY - 3
    plain = upstream(logits, ids, settings[0], 0, 1.0, settings[3])[0]
    tokens = plain.sort(descending=True).indices[[0, kept - 2, kept - 1, kept, kept + 1, VOCABULARY - 1]]
    noise = torch.full((len(tokens), VOCABULARY), 1e30, device=device).scatter_(1, tokens[:, None], 1e-30)
    wide = [tensor.expand(len(tokens), -1).contiguous() for tensor in (logits, seen)]
    token = sample(*wide, noise, *settings, run=run)
    assert (token == tokens).tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_with_ties_at_the_edge_of_top_k(dtype, device, run):
    logits, _, _ = case(8, device, dtype)
    noise = draw(logits)
    settings = (0.9, 20, 1.0, 1.0)
    assert torch.equal(sample(logits, None, noise, *settings, run=run), reference(logits, None, noise, *settings))


def test_hidden_tokens_rows_with_strides_and_equal_values(device, run):
    logits = torch.randn(6, 2, 130, device=device)[:, 1]
    logits[:, 50:] = -torch.inf
    logits[0, :50] = 0.0
    noise = draw(logits)
    for settings in ((1.0, 10, 0.9, 1.0), (2.0, 0, 0.5, 1.0)):
        token = sample(logits, None, noise, *settings, run=run)
        assert (token < 50).all() and torch.equal(token[1:], reference(logits, None, noise, *settings)[1:])
    zero = torch.tensor([[0.0, -0.0, -1.0]], device=device)  # a k-th largest of −0 keeps both zeros
    noise = torch.tensor([[1e30, 1.0, 1e30]], device=device)
    assert sample(zero, None, noise, 1.0, 1, 1.0, 1.0, run=run).item() == 1


def test_envelope(device):
    logits, noise = torch.zeros(2, 2, 8, device=device).unbind()
    assert sample.unsupported(logits, None, noise, 1.0, 0, 1.0, 1.0) is None
    for change, part in (
        ({"logits": logits.double()}, "float64"),
        ({"logits": logits.T}, "stride"),
        ({"noise": noise[:1]}, "noise"),
        ({"seen": noise}, "seen"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"logits": torch.zeros(1, 16385), "noise": torch.zeros(1, 16385)}, "16384"),
    ):
        arguments = {"logits": logits, "seen": None, "noise": noise, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        assert part in sample.unsupported(**(arguments | {"penalty": 1.0} | change))
