"""A bidirectional LSTM on padded rows with their lengths on the device: what packing gives, without its host copy.

``pack_padded_sequence`` wants lengths on the host, so a captured graph cannot hold it. Here each direction is an LSTM
of its own: one reads the rows as they are, the other rows that were rolled and reversed, so that each begins with its
row's last unit. Either reads its row first and what lies behind the end last. The directions are branches of a graph.
Twice the rows in one bidirectional call would do it too, but cuDNN multiplies more than one row in TF32 where it
multiplies a single one in fp32, and rounded durations then differ from upstream's.

cuDNN reads an LSTM's weights as one block, and upstream models call ``flatten_parameters`` on every forward, which
moves them to a new block each time. Graphs therefore read copies, and a module whose weights moved is compared with
its copies: it has not changed where they hold the same values.
Source: torch.nn.LSTM, torch.nn.utils.rnn and RNNBase.flatten_parameters.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from voxfuse.fusions._fork import Fork
from voxfuse.fusions._weights import Weights, version
from voxfuse.kernels._packs import pack

Directions = tuple[nn.LSTM, nn.LSTM]  # forward, reverse
_copies: WeakKeyDictionary[nn.LSTM, Directions] = WeakKeyDictionary()
_lock = threading.Lock()


def unsupported(lstm: nn.Module) -> str | None:
    """Why a module cannot run through ``bidirectional``, or None."""
    if type(lstm) is not nn.LSTM:
        return f"expected an nn.LSTM, got {type(lstm).__name__}"
    if not (lstm.batch_first and lstm.bidirectional) or lstm.num_layers != 1 or lstm.proj_size:
        return f"expected one bidirectional layer with batch_first, got {lstm}"
    if any(weight.is_inference() for weight in lstm.parameters()):
        return "an LSTM's weights are inference tensors, whose changes cannot be seen"
    return None


def bidirectional(lstm: nn.LSTM, x: torch.Tensor, lengths: torch.Tensor | None, lane: int = 0) -> torch.Tensor:
    """The output [rows, units, 2·hidden] of x [rows, units, channels], zero behind each row's end.

    ``lengths``: int64 [rows] on the device, at least 1 each; None where all of every row is valid, which the module
    runs by itself. What x holds behind a row's end means nothing. ``lane`` is that of the reverse direction's branch
    (``_fork``). Capturable; no gradient reaches the weights.
    """
    if lengths is None:
        output: torch.Tensor = lstm(x)[0]
        return output
    units = x.shape[1]
    forward, reverse = private_copies(lstm)
    position = torch.arange(units, device=x.device)
    length = lengths.unsqueeze(1)
    backwards = (length - 1 - position) % units
    turned = _take(x, backwards)
    fork = Fork(lambda: reverse(turned)[0], lane)
    joined = torch.cat([forward(x)[0], _take(fork.join(), backwards)], dim=2)
    return joined.masked_fill_((position >= length).unsqueeze(2), 0.0)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Units ``index`` [rows, units] of each row of x."""
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


def private_copies(lstm: nn.LSTM) -> Directions:
    """Copies of the module's directions for graphs to read: the same ones until a weight holds other values.

    Waits for the device where the weights moved or were written since the last call; under capture, which cannot, they
    are those of the run before.
    """
    if lstm.weight_ih_l0.is_cuda and torch.cuda.is_current_stream_capturing():
        return _copies[lstm]
    return pack(lstm, "private_copies", list(lstm.parameters()), lambda: _renewed(lstm))


def _renewed(lstm: nn.LSTM) -> Directions:
    with _lock:
        held = _copies.get(lstm)
        if held is None or not _same_values(held, lstm):
            with torch.inference_mode(False), torch.no_grad():
                held = _direction(lstm, ""), _direction(lstm, "_reverse")
            _copies[lstm] = held
    return held


def _direction(lstm: nn.LSTM, suffix: str) -> nn.LSTM:
    like: Any = lstm.weight_ih_l0
    # On "meta", because drawing weights would change the noise that the model draws next.
    made = nn.LSTM(lstm.input_size, lstm.hidden_size, bias=lstm.bias, batch_first=True, device="meta", dtype=like.dtype)
    made.to_empty(device=like.device)
    for name, weight in made.named_parameters():
        weight.copy_(getattr(lstm, name + suffix))
    made.flatten_parameters()
    return made.requires_grad_(False).eval()


def _same_values(held: Directions, lstm: nn.LSTM) -> bool:
    pairs = [
        (copied, getattr(lstm, name + suffix))
        for direction, suffix in zip(held, ("", "_reverse"), strict=True)
        for name, copied in direction.named_parameters()
    ]
    if len(pairs) != sum(1 for _ in lstm.parameters()):  # with and without biases
        return False
    return all((a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) and torch.equal(a, b) for a, b in pairs)


class WeightsThatMove(Weights):
    """``Weights`` of a module whose LSTMs may move theirs: those count as changed where a value did."""

    def __init__(self, module: nn.Module, without: Sequence[str] = ()) -> None:
        self._lstms = [part for part in module.modules() if type(part) is nn.LSTM]
        self._movable = [weight for lstm in self._lstms for weight in lstm.parameters()]
        self._places = self._now()
        self._held = list(map(private_copies, self._lstms))
        super().__init__(module, self._movable, without)

    def changed(self) -> bool:
        if super().changed():
            return True
        places = self._now()
        if places is not None and places == self._places:  # neither moved nor written
            return False
        if not all(map(operator.is_, map(private_copies, self._lstms), self._held)):
            return True
        self._places = places
        return False

    def _now(self) -> list[tuple[int, int]] | None:
        """Addresses and versions, or None of inference tensors, which have no version."""
        if any(map(torch.Tensor.is_inference, self._movable)):
            return None
        return list(zip(map(torch.Tensor.data_ptr, self._movable), map(version, self._movable), strict=True))
