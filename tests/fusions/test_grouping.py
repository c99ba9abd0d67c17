"""Groups by padding waste, and rows of mixed lengths decoded as alone."""

import hift_classes
import pytest
import torch
from fake_arena import FakeArena
from hypothesis import given, settings
from hypothesis import strategies as st

from voxfuse.fusions import hift_graph
from voxfuse.fusions.grouping import by_padding, decode_rows
from voxfuse.fusions.hift import samples_per_frame
from voxfuse.kernels._op import TALLIES, Run


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 600), max_size=40), st.sampled_from([0.0, 0.1, 0.25, 0.9]), st.integers(1, 16))
def test_every_row_once_in_groups_within_bounds(lengths, waste, rows):
    groups = by_padding(lengths, waste, rows)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        padding = sum(longest - lengths[i] for i in group)
        assert len(group) <= rows and padding <= waste * longest * len(group) + 1e-9
        assert lengths[group[0]] == longest


def test_known_groups():
    assert by_padding([100, 500, 98, 490, 10], 0.1) == [[1, 3], [0, 2], [4]]
    assert by_padding([3] * 20) == [list(range(16)), list(range(16, 20))] and by_padding([]) == []
    assert by_padding([5, 4], 0.0) == [[0], [1]] and by_padding([4, 4], 0.0) == [[0, 1]]
    for wrong in (dict(waste=1.0), dict(waste=-0.1), dict(rows=0), dict(lengths=[-1])):
        with pytest.raises(ValueError, match="expected a share of waste"):
            by_padding(**{"lengths": [1]} | wrong)


@pytest.mark.parametrize("stack", hift_classes.MODULES)
@pytest.mark.parametrize("captures", [True, False])
def test_rows_of_mixed_lengths_are_those_alone(stack, captures, monkeypatch, request):
    monkeypatch.setattr(hift_graph, "unsupported", lambda *_: None)
    FakeArena.made = []
    hift = hift_classes.generator(stack)
    run = Run("reference", request.node.nodeid)
    graphs = hift_graph.Runners(run, "first_use" if captures else "warmup", FakeArena)
    per_frame, lengths = samples_per_frame(hift), (7, 1, 12, 11, 6)
    mels = [torch.randn(hift_classes.BINS, frames) for frames in lengths]
    sources = [0.1 * torch.randn(1, frames * per_frame) for frames in lengths]
    with torch.no_grad():
        together = decode_rows(graphs, hift, mels, sources)
        for audio, mel, source in zip(together, mels, sources, strict=True):
            alone = hift.decode(x=mel[None], s=source[None])[0]
            assert audio.shape == alone.shape and (audio - alone).norm() < 1e-5 * alone.norm()
        with pytest.raises(ValueError, match="expected a source of"):
            decode_rows(graphs, hift, mels, sources[::-1])
    fallbacks = TALLIES.of(run.receipt).fallbacks
    assert not fallbacks if captures else all("no graph" in reason for reason in fallbacks) and fallbacks
