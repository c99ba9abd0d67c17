"""Samplers where only a GPU can tell: multinomial's stream, graphs, host cost, large speech vocabularies."""

import pytest
import torch
from host_cost import assert_cheap

from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.ras_sampler import ras_sample
from voxfuse.kernels.ras_sampler import reference as ras_reference
from voxfuse.kernels.sampler import draw, reference, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RUN = Run("triton", "sampler gpu")


@pytest.mark.parametrize("vocabulary", [1024, 6761, 8194, 16384])
def test_tokens_are_multinomials_under_the_same_seed(vocabulary):
    logits = 3.0 * torch.randn(64, vocabulary, device="cuda")
    torch.manual_seed(5)
    expected = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    torch.manual_seed(5)
    noise = draw(logits)
    after = torch.rand(1, device="cuda")
    torch.manual_seed(5)
    torch.multinomial(logits.softmax(-1), 1)
    assert torch.equal(after, torch.rand(1, device="cuda")), "the stream moved on by another step"
    token = sample(logits, None, noise, 1.0, 0, 1.0, 1.0, run=RUN)
    assert (token != expected).float().mean() <= 1 / 64  # two candidates within rounding
    for settings in ((0.8, 50, 0.9, 1.2), (1.0, 0, 0.8, 1.0)):
        seen = torch.rand_like(logits) < 0.1
        token = sample(logits, seen, noise, *settings, run=RUN)
        assert (token != reference(logits, seen, noise, *settings)).float().mean() <= 2 / 64


def test_the_start_of_a_longer_draw_is_a_shorter_one():
    """What upstream's nucleus of any size draws: a GPU's generator gives it whatever the size, up to top_k."""
    for size in (1, 2, 7, 24, 25):
        torch.manual_seed(size)
        short, next_short = draw(torch.empty(size, device="cuda")), torch.rand(2, device="cuda")
        torch.manual_seed(size)
        long, next_long = draw(torch.empty(25, device="cuda")), torch.rand(2, device="cuda")
        assert torch.equal(short, long[:size]) and torch.equal(next_short, next_long)


def test_repetition_aware_rows():
    scores = (3.0 * torch.randn(64, 6761, device="cuda")).log_softmax(-1)
    recent = scores.topk(10).indices
    noise = draw(scores[:, :25]), draw(scores)
    token = ras_sample(scores, recent, *noise, 0.8, 1.0, True, run=RUN)
    expected = ras_reference(scores, recent, *noise, 0.8, 1.0, True)
    assert (token != expected).any(1).float().mean() <= 2 / 64 and 0 < token[:, 1].sum() <= 64


def test_replays_follow_their_inputs():
    logits, noise = torch.randn(4, 6761, device="cuda"), torch.rand(4, 6761, device="cuda")
    settings = (0.8, 25, 0.8, 1.0)
    sample(logits, None, noise, *settings, run=RUN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token = sample(logits, None, noise, *settings, run=RUN)
    for _ in range(3):
        logits.normal_()
        noise.exponential_()
        graph.replay()
        assert torch.equal(token, reference(logits, None, noise, *settings))


@torch.no_grad()
def test_host_cost_of_a_call():
    scores = torch.randn(1, 6761, device="cuda")
    noise, recent = (draw(scores[:, :25]), draw(scores)), torch.full((1, 10), -1, device="cuda")
    assert_cheap(lambda: sample(scores, None, noise[1], 0.8, 25, 0.8, 1.0, run=RUN))
    assert_cheap(lambda: ras_sample(scores, recent, *noise, 0.8, 1.0, True, run=RUN))
    assert TALLIES.of(RUN.receipt).fallbacks == {}
