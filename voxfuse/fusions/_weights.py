"""Whether a module still holds the tensors that something was derived from, told in tens of microseconds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


class Weights:
    """The parameters, buffers and submodules of a module as they were; ``changed`` says whether they still are.

    Seen: a submodule, parameter or buffer that was replaced (compared by identity), moved or cast (data pointer), or
    written in place (version), so ``load_state_dict``, ``.to()`` and optimizer steps. Not seen: writes through
    ``.data`` and other aliases that do not share the tensor's version, a new ``.data`` at the old address, in-place
    writes to inference tensors, tensors in plain attributes, and the first parameter of a submodule that had none.
    Of ``movable`` tensors only a replacement is seen, of the children named in ``without`` too. Every loop of
    ``changed`` runs in C.
    """

    def __init__(self, module: nn.Module, movable: Sequence[torch.Tensor] = (), without: Sequence[str] = ()) -> None:
        left_out = {part for name in without for part in module.get_submodule(name).modules()}
        parts = [part for part in module.modules() if part not in left_out]
        self._tables: list[dict[str, Any]] = [
            table for part in parts for table in (part._modules, part._parameters, part._buffers) if table
        ]
        self._entries = self._current()
        apart = set(map(id, movable))
        self._tensors = [e for e in self._entries if isinstance(e, torch.Tensor) and id(e) not in apart]
        self._tracked = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        self._versions = list(map(_version, self._tracked))

    def _current(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def changed(self) -> bool:
        """Whether anything that the class sees is other than when this was made."""
        current = self._current()
        return (
            len(current) != len(self._entries)
            or not all(map(operator.is_, current, self._entries))
            or list(map(torch.Tensor.data_ptr, self._tensors)) != self._pointers
            or list(map(_version, self._tracked)) != self._versions
        )
