"""Repetition-aware sampling against CosyVoice's functions, from the same seed."""

import pytest
import torch
from cosyvoice_sampling import nucleus_size, ras_sampling

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.ras_sampler import ras_sample, reference
from voxfuse.kernels.sampler import draw

VOCABULARY = 300
TOP_K = 25


def upstreams_noise(scores, top_p, top_k, seed):
    """What upstream draws for the nucleus, NaN behind its size, and then for all tokens."""
    torch.manual_seed(seed)
    size = nucleus_size(scores.softmax(dim=0).sort(descending=True).values, top_p, top_k)
    nucleus = torch.full((1, top_k), torch.nan)
    nucleus[0, :size] = draw(scores[:size])
    return nucleus.to(scores.device), draw(scores)[None]


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])  # a nucleus of top_k, of some, of one or two
def test_tokens_are_cosyvoices_under_the_same_seed(spread, exclude, device, run, poisoned_empty):
    repeated = 0
    for seed in range(24):
        scores = (spread * torch.randn(VOCABULARY)).log_softmax(dim=0)
        likely = scores.topk(8).indices.tolist()
        decoded = (likely * 3)[: seed % 14]
        torch.manual_seed(seed)
        expected = ras_sampling(scores, decoded, exclude=exclude)
        noise = upstreams_noise(scores, 0.8, TOP_K, seed)
        recent = torch.tensor([decoded[-10:] + [-1] * (10 - len(decoded[-10:]))])
        arguments = [tensor.to(device) for tensor in (scores[None], recent, *noise)]
        token, again = ras_sample(*arguments, 0.8, 10 * 0.1, exclude, run=run)[0].tolist()
        assert token == expected
        assert reference(*arguments, 0.8, 10 * 0.1, exclude)[0].tolist() == [token, again]
        repeated += again
    assert 0 < repeated < 24, "both ways must be taken"
    assert TALLIES.of(run.receipt).calls == 24 and not TALLIES.of(run.receipt).fallbacks


def test_rows_windows_and_types(device, run):
    for dtype, window, top_k in ((torch.float32, 1, 3), (torch.bfloat16, 7, 40), (torch.float16, 0, 60)):
        scores = torch.randn(5, VOCABULARY, device=device).to(dtype)
        recent = torch.randint(0, 9, (5, window), device=device)
        noise = draw(scores.new_empty(5, top_k)), draw(scores)
        got = ras_sample(scores, recent, *noise, 0.7, 1.0, True, run=run)
        assert torch.equal(got, reference(scores, recent, *noise, 0.7, 1.0, True))
    assert ras_sample(scores[:0], recent[:0], *(n[:0] for n in noise), 0.7, 1.0, True, run=run).shape == (0, 2)


def test_equal_values_take_the_lower_index_first(device, run):
    scores = torch.zeros(1, 10, device=device)
    noise = torch.tensor([[1.0, 1.0, 0.5]], device=device), torch.ones(1, 10, device=device)
    recent = torch.full((1, 2), -1, device=device)
    assert ras_sample(scores, recent, *noise, 0.8, 1.0, True, run=run).tolist() == [[2, 0]]
    recent[0, 1] = 2
    assert ras_sample(scores, recent, *noise, 0.8, 1.0, True, run=run).tolist() == [[0, 1]]
    assert ras_sample(scores, recent, *noise, 0.8, 2.0, True, run=run).tolist() == [[2, 0]]


def test_envelope(device):
    scores, recent, noise = torch.zeros(2, 8, device=device), torch.zeros(2, 3, device=device).long(), torch.ones(2, 8)
    noise = noise.to(device)
    assert ras_sample.unsupported(scores, recent, noise[:, :4].contiguous(), noise, 0.8, 1.0, True) is None
    assert "noise" in ras_sample.unsupported(scores, recent, noise, noise[:, :4].contiguous(), 0.8, 1.0, True)
    assert "recent" in ras_sample.unsupported(scores, recent.int(), noise, noise, 0.8, 1.0, True)
    assert "scores" in ras_sample.unsupported(scores.double(), recent, noise, noise, 0.8, 1.0, True)
