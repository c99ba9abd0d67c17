"""A bidirectional LSTM on padded rows against nn.LSTM on a packed sequence, and which of its changes count."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from voxfuse.fusions.lstm import WeightsThatMove, bidirectional, private_copies, unsupported

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def lstm(dtype=torch.float32):
    return nn.LSTM(6, 5, 1, batch_first=True, bidirectional=True).to(dtype).eval()


def packed(module, x, lengths):
    rows = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(module(rows)[0], batch_first=True, total_length=x.shape[1])[0]


def flattened(module):
    """What flatten_parameters does to the weights on a GPU: the same values elsewhere."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.set_(weight.clone())


@torch.no_grad()
@pytest.mark.parametrize("garbage", [0.0, 1e9, float("nan")])
@pytest.mark.parametrize("lengths", [(7,), (1,), (12,), (3, 12, 1, 8), (2, 2)])
def test_mixed_lengths_equal_a_packed_sequence(lengths, garbage):
    module, x = lstm(), torch.randn(len(lengths), 12, 6)
    expected = packed(module, x, lengths)
    for row, length in enumerate(lengths):
        x[row, length:] = garbage
    result = bidirectional(module, x, torch.tensor(lengths))
    torch.testing.assert_close(result, expected, **CLOSE)
    assert all(torch.all(result[row, length:] == 0) for row, length in enumerate(lengths))


@torch.no_grad()
def test_without_lengths_the_module_runs_by_itself():
    module, x = lstm(), torch.randn(2, 9, 6)
    assert torch.equal(bidirectional(module, x, None), module(x)[0])


@torch.no_grad()
def test_the_copy_follows_the_values_of_the_weights_not_their_place():
    module, x, lengths = lstm(), torch.randn(1, 9, 6), torch.tensor([5])
    first, watch = private_copies(module), WeightsThatMove(nn.ModuleList([module]))
    flattened(module)
    assert private_copies(module) is first and not watch.changed()
    module.weight_hh_l0_reverse.mul_(2)
    assert watch.changed() and private_copies(module) is not first
    torch.testing.assert_close(bidirectional(module, x, lengths)[:, :5], module(x[:, :5])[0], **CLOSE)
    module.double()
    torch.testing.assert_close(bidirectional(module, x.double(), lengths)[:, :5], module(x[:, :5].double())[0])


@torch.no_grad()
def test_other_weights_still_count_where_they_are():
    parts = nn.ModuleList([lstm(), nn.Linear(2, 2)])
    watch = WeightsThatMove(parts)
    flattened(parts[1])
    assert watch.changed()
    watch = WeightsThatMove(parts)
    parts[0].bias_ih_l0 = nn.Parameter(parts[0].bias_ih_l0.clone())
    assert watch.changed(), "another parameter object"
    watch = WeightsThatMove(parts, without=("1",))
    parts[1].weight.mul_(2)
    assert not watch.changed()
    parts[1] = nn.Linear(2, 2)
    assert watch.changed(), "another module in place of the child that is left out"


def test_a_copy_made_under_inference_mode_serves_outside():
    module, x = lstm(), torch.randn(1, 4, 6)
    with torch.inference_mode():
        bidirectional(module, x, torch.tensor([4]))
    state = torch.get_rng_state()
    copies = private_copies(module)
    assert not any(weight.is_inference() for copied in copies for weight in copied.parameters())
    fresh = lstm()
    torch.set_rng_state(state)
    private_copies(fresh)
    assert torch.equal(torch.get_rng_state(), state), "making the copies drew random numbers"
    assert set(dict(module.named_modules())) == {""} and all(weight.requires_grad for weight in module.parameters())


def test_what_is_refused():
    assert unsupported(lstm()) is None
    assert "got GRU" in unsupported(nn.GRU(2, 2))
    for options in ({}, {"batch_first": True}, {"batch_first": True, "bidirectional": True, "num_layers": 2}):
        assert "expected one bidirectional layer" in unsupported(nn.LSTM(2, 2, **options))
    with torch.inference_mode():
        assert "inference tensors" in unsupported(lstm().to(torch.float64))
