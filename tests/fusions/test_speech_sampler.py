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
