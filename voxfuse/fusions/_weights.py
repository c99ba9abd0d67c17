"""Whether a module still holds the tensors that something was derived from, told in tens of microseconds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


class Weights:
    """The parameters, buffers and submodules of a module as they were; ``changed`` says whether they still are.

    Seen: a submodule, parameter or buffer that was replaced (compared by identity), moved or cast (data pointer), or
    written in place (version), so ``load_state_dict``, ``.to()`` and optimizer steps. Not seen: writes through
    ``.data`` and other aliases that do not share the tensor's version, a new ``.data`` at the old address, in-place
    writes to inference tensors, tensors in plain attributes, and the first parameter of a submodule that had none.
    Of ``movable`` tensors only a replacement is seen, of the children named in ``without`` too. Every loop of
    ``changed`` runs in C, and none of them builds anything for each submodule.
    """

    def __init__(self, module: nn.Module, movable: Sequence[torch.Tensor] = (), without: Sequence[str] = ()) -> None:
        left_out = {part for name in without for part in module.get_submodule(name).modules()}
        parts = [part for part in module.modules() if part not in left_out]
        self._tables: list[dict[str, Any]] = [
            table for part in parts for table in (part._modules, part._parameters, part._buffers) if table
        ]
        self._copies = [dict(table) for table in self._tables]
        held = [(table, name, entry) for table in self._tables for name, entry in table.items()]
        tensors = [(table, name, entry) for table, name, entry in held if isinstance(entry, torch.Tensor)]
        self._scalars = [(table, name, entry) for table, name, entry in tensors if entry.numel() < 2]
        apart = set(map(id, movable))
        self._tensors = list({id(entry): entry for _, _, entry in tensors if id(entry) not in apart}.values())
        self._tracked = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._pointers = list(map(torch.Tensor.data_ptr, self._tensors))
        self._versions = list(map(version, self._tracked))

    def changed(self) -> bool:
        """Whether anything that the class sees is other than when this was made."""
        return (
            self._replaced()
            or list(map(torch.Tensor.data_ptr, self._tensors)) != self._pointers
            or list(map(version, self._tracked)) != self._versions
        )

    def memory(self) -> list[torch.UntypedStorage]:
        """What the parameters and buffers lie in, but for movable ones."""
        return [tensor.untyped_storage() for tensor in self._tensors]

    def _replaced(self) -> bool:
        # Dictionaries compare values by identity first. Another module is unequal; another tensor of several elements
        # raises when its comparison is asked for one truth value; one of a single element can be equal, so those are
        # looked at by themselves.
        try:
            if self._tables != self._copies:
                return True
        except (RuntimeError, TypeError, ValueError):
            return True
        return any(table.get(name) is not entry for table, name, entry in self._scalars)
