"""CosyVoice's sampling callable: tokens and random stream of upstream over a whole generation."""

import pytest
import torch
from cosyvoice_sampling import ras_sampling

from voxfuse.fusions.speech_sampler import RasSampler
from voxfuse.kernels._op import TALLIES, Run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_a_generation_has_upstreams_tokens_and_stream(device, exclude, request):
    run = Run("triton" if device == "cuda" else "reference", request.node.nodeid)
    sampler = RasSampler(run, exclude=exclude)
    streams, ends = [], []
    for pick in (lambda scores, decoded: ras_sampling(scores, decoded, exclude=exclude), sampler):
        torch.manual_seed(8)
        table = (3.0 * torch.randn(1500, 40)).to(device)
        torch.manual_seed(9)
        decoded = []
        for _ in range(80):
            scores = table[:, decoded[-1] % 40 if decoded else 0].log_softmax(dim=0)
            decoded.append(pick(scores, decoded))
        streams.append(decoded)
        ends.append(torch.rand(3, device=device))
    assert streams[0] == streams[1]
    assert torch.equal(*ends), "the generator is not where upstream leaves it"
    tally = TALLIES.of(run.receipt)
    assert (tally.calls, sum(tally.fallbacks.values())) == ((80, 0) if device == "cuda" else (0, 80))


def test_a_generator_of_its_own():
    scores = torch.randn(50).log_softmax(dim=0)
    picks = []
    for _ in range(2):
        sampler = RasSampler(Run("reference", "own"), generator=torch.Generator().manual_seed(4))
        picks.append([sampler(scores, []) for _ in range(20)])
    assert picks[0] == picks[1] and len(set(picks[0])) > 3


@pytest.mark.parametrize("exclude", [True, False])
def test_an_unused_draw_is_given_back(exclude, request):
    """The way of a GPU, on the CPU's generator: with a nucleus of top_k at every token, it draws alike."""
    run = Run("reference", request.node.nodeid)
    table = (0.3 * torch.randn(5, 300)).log_softmax(dim=-1)
    torch.manual_seed(9)
    expected = []
    for index in range(60):
        expected.append(ras_sampling(table[index % 5], expected, win_size=20, tau_r=0.05, exclude=exclude))
    end = torch.rand(3)
    torch.manual_seed(9)
    sampler, decoded = RasSampler(run, win_size=20, tau_r=0.05, exclude=exclude), []
    for index in range(60):
        decoded.append(sampler._on_device(table[index % 5, None], decoded, torch.default_generator))
    assert decoded == expected and torch.equal(torch.rand(3), end)
    repeats = sum(token in decoded[max(index - 20, 0) : index] for index, token in enumerate(decoded))
    assert TALLIES.of(run.receipt).calls == 60 and repeats < 60
