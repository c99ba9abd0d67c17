"""A bidirectional LSTM on padded rows with their lengths on the device: what packing gives, without its host copy.

``pack_padded_sequence`` wants lengths on the host, so a captured graph cannot hold it. Here the module runs on twice
the rows: once as they are, of which the forward half counts, and once rolled so that each row ends at the last unit,
of which the reverse half counts. Either half reads its row first and what lies behind the end last.

cuDNN reads an LSTM's weights as one block, and upstream models call ``flatten_parameters`` on every forward, which
moves them to a new block each time. Graphs therefore read a copy of the module, and a module whose weights moved is
compared with its copy: it has not changed where they hold the same values.
Source: torch.nn.LSTM, torch.nn.utils.rnn and RNNBase.flatten_parameters.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from voxfuse.fusions._weights import Weights
from voxfuse.kernels._packs import pack

_copies: WeakKeyDictionary[nn.LSTM, nn.LSTM] = WeakKeyDictionary()
_lock = threading.Lock()


def unsupported(lstm: nn.Module) -> str | None:
    """Why a module cannot run through ``bidirectional``, or None."""
    if type(lstm) is not nn.LSTM:
        return f"expected an nn.LSTM, got {type(lstm).__name__}"
    if not (lstm.batch_first and lstm.bidirectional) or lstm.num_layers != 1:
        return f"expected one bidirectional layer with batch_first, got {lstm}"
    if any(weight.is_inference() for weight in lstm.parameters()):
        return "an LSTM's weights are inference tensors, whose changes cannot be seen"
    return None


def bidirectional(lstm: nn.LSTM, x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """The output [rows, units, 2·hidden] of x [rows, units, channels], zero behind each row's end.

    ``lengths``: int64 [rows] on the device, at least 1 each; None where all of every row is valid, which the module
    runs by itself. What x holds behind a row's end means nothing. Capturable; no gradient reaches the weights.
    """
    if lengths is None:
        output: torch.Tensor = lstm(x)[0]
        return output
    rows, units, _ = x.shape
    position = torch.arange(units, device=x.device)
    length = lengths.unsqueeze(1)
    both, _ = private_copy(lstm)(torch.cat([x, _take(x, (position + length) % units)]))
    forward, reverse = both[:rows, :, : lstm.hidden_size], both[rows:, :, lstm.hidden_size :]
    joined = torch.cat([forward, _take(reverse, (position - length) % units)], dim=2)
    return joined.masked_fill_((position >= length).unsqueeze(2), 0.0)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Units ``index`` [rows, units] of each row of x."""
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


def private_copy(lstm: nn.LSTM) -> nn.LSTM:
    """A copy of the module for graphs to read: the same one until a weight holds other values.

    Waits for the device where the weights moved or were written since the last call; under capture, which cannot, it
    is the copy of the run before.
    """
    if lstm.weight_ih_l0.is_cuda and torch.cuda.is_current_stream_capturing():
        return _copies[lstm]
    return pack(lstm, "private_copy", list(lstm.parameters()), lambda: _renewed(lstm))


def _renewed(lstm: nn.LSTM) -> nn.LSTM:
    with _lock:
        held = _copies.get(lstm)
        if held is None or not _same_values(held, lstm):
            with torch.inference_mode(False), torch.no_grad():
                held = copy.deepcopy(lstm).requires_grad_(False)
                held.flatten_parameters()
            _copies[lstm] = held
    return held


def _same_values(one: nn.LSTM, other: nn.LSTM) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all((a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b) for a, b in pairs)


class WeightsThatMove(Weights):
    """``Weights`` of a module whose LSTMs may move theirs: those count as changed where a value did."""

    def __init__(self, module: nn.Module, without: Sequence[str] = ()) -> None:
        self._lstms = [part for part in module.modules() if type(part) is nn.LSTM]
        self._held = list(map(private_copy, self._lstms))
        movable = [weight for lstm in self._lstms for weight in lstm.parameters()]
        super().__init__(module, movable, without)

    def changed(self) -> bool:
        return super().changed() or not all(map(operator.is_, map(private_copy, self._lstms), self._held))
