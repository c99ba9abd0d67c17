"""Sums of codebook embeddings: against the chains that upstream writes, strides, ids that are wrong."""

import pytest
import torch
import torch.nn.functional as F

from voxfuse.kernels._op import TALLIES
from voxfuse.kernels.embedding_sum import BLOCK, embedding_sum, reference

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def case(shape, entries, hidden, dtype, device):
    """ids [*shape, codebooks], one table for all, and where each codebook's begins."""
    sizes = torch.tensor(entries)
    ids = torch.stack([torch.randint(0, int(size), shape) for size in sizes], dim=-1).to(device)
    return ids, torch.randn(int(sizes.sum()), hidden).to(device, dtype), (sizes.cumsum(0) - sizes).to(device)


def by_hand(ids, table, offsets):
    """Each codebook's own table, in fp64."""
    starts = offsets.tolist()
    tables = [table[a:b].double() for a, b in zip(starts, [*starts[1:], len(table)], strict=True)]
    return sum(tables[c][ids[..., c]] for c in range(len(tables)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hidden", [1024, BLOCK + 8, 60])
@pytest.mark.parametrize("order", ["once", "mean"])
def test_same_precision_as_upstream(order, hidden, dtype, device, run, same_precision, poisoned_empty):
    arguments = case((2, 3), [30, 20, 20, 20, 7], hidden, dtype, device)
    y = embedding_sum(*arguments, order, run=run)
    assert y.dtype == dtype and y.shape == (2, 3, hidden)
    exact = by_hand(*arguments) / (5 if order == "mean" else 1)
    same_precision(y, reference(*arguments, order), exact)
    assert TALLIES.of(run.receipt).calls == 1 and not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("dtype", TYPES)
def test_a_loop_over_codebooks_bit_for_bit(dtype, device, run, poisoned_empty):
    ids, table, offsets = case((4,), [9] * 33, 96, dtype, device)  # MOSS-TTS: text and 32 codebooks
    tables = table.split(9)
    expected = sum(F.embedding(ids[:, c], tables[c]) for c in range(33))
    assert torch.equal(embedding_sum(ids, table, offsets, "each", run=run), expected)
    assert torch.equal(reference(ids, table, offsets, "each"), expected)
    if dtype != torch.float32:
        once = embedding_sum(ids, table, offsets, "once", run=run)
        assert (once != expected).float().mean() > 0.3, "the data cannot tell the orders apart"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code2wavs_mean_over_16_codebooks(dtype, device, run, same_precision):
    """As Qwen3OmniMoeCode2Wav: codes [rows, codebooks, frames] + code_offset [1, codebooks, 1], mean over dim 1."""
    ids, table, offsets = case((2, 5), [12] * 16, 64, dtype, device)
    codes = ids.transpose(1, 2).contiguous()
    expected = F.embedding(codes + offsets.view(1, -1, 1), table).mean(1)
    y = embedding_sum(codes.transpose(1, 2), table, offsets, "mean", run=run)
    same_precision(y, expected, by_hand(ids, table, offsets) / 16)
    assert not TALLIES.of(run.receipt).fallbacks


def test_any_strides_and_int32(device, run):
    ids, table, offsets = case((3, 2), [5, 6, 7], 40, torch.float32, device)
    expected = embedding_sum(ids, table, offsets, "each", run=run)
    wide = torch.zeros(3, 2, 9, dtype=torch.int32, device=device)
    wide[..., 1::3] = ids.int()
    padded = torch.cat([table, table], dim=1)[:, :40]
    for other in (wide[..., 1::3], ids.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(embedding_sum(other, padded, offsets, "each", run=run), expected)
    assert not TALLIES.of(run.receipt).fallbacks


@pytest.mark.parametrize("order", ["once", "mean", "each"])
def test_ids_outside_of_the_table_give_nan_in_their_own_token_only(order, device, run):
    ids, table, offsets = case((4,), [5, 6], 40, torch.float32, device)
    ids[1, 1], ids[2, 0] = 6, -1
    y = embedding_sum(ids, table, offsets, order, run=run)
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


def test_zero_sizes_return_at_once(device, run):
    ids, table, offsets = case((0, 2), [5, 6], 40, torch.float32, device)
    assert embedding_sum(ids, table, offsets, "once", run=run).shape == (0, 2, 40)


def test_envelope(device):
    ids, table, offsets = case((2,), [5, 6], 40, torch.float32, device)
    assert embedding_sum.unsupported(ids, table, offsets, "once") is None
    assert "order must be" in embedding_sum.unsupported(ids, table, offsets, "twice")
    assert "ids must be" in embedding_sum.unsupported(ids.float(), table, offsets, "once")
    assert "1 to 64 codebooks" in embedding_sum.unsupported(ids[:, :0], table, offsets, "once")
    assert "table must be" in embedding_sum.unsupported(ids, table.double(), offsets, "once")
    assert "offsets must be" in embedding_sum.unsupported(ids, table, offsets[:1], "once")
