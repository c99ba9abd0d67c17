"""Buckets of lengths, and the tensors that grow with a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Length(NamedTuple):
    """An axis that grows with the length: ``per_unit`` elements for each unit."""

    per_unit: int


Axes = tuple["int | Length", ...]  # the axes of a tensor behind its first, the rows; at most one Length


@dataclass(frozen=True)
class Buckets:
    """Lengths are rounded up to multiples of ``finest``, and from 8 · ``finest`` on to an eighth of their octave: at
    most 1/8 is padding there. Rows are exact. Longer or wider calls have no bucket."""

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    finest: int = 8
    shortest: int = 1
    longest: int = 2048

    def of(self, length: int) -> int:
        """The bucket of a length."""
        step = max(self.finest, (1 << (length - 1).bit_length()) // 16)
        return -(-length // step) * step

    def refusal(self, rows: int, length: int) -> str | None:
        """Why there is no bucket, or None."""
        if rows not in self.rows:
            return f"{rows} rows: graphs are captured for {', '.join(map(str, self.rows))}"
        if not self.shortest <= length <= self.longest:
            return f"a length outside {self.shortest} to {self.longest}"
        return None


def shape(rows: int, axes: Axes, length: int) -> tuple[int, ...]:
    """The shape of a tensor of these axes at a length."""
    return rows, *(axis.per_unit * length if isinstance(axis, Length) else axis for axis in axes)


def part(tensor: torch.Tensor, axes: Axes, start: int, stop: int) -> torch.Tensor:
    """Units ``start`` to ``stop`` of a tensor, a view; all of a tensor that has no length."""
    for dim, axis in enumerate(axes, 1):
        if isinstance(axis, Length):
            return tensor.narrow(dim, start * axis.per_unit, (stop - start) * axis.per_unit)
    return tensor


def common_length(tensors: Sequence[torch.Tensor], inputs: Sequence[Axes]) -> int:
    """The length of tensors of these axes, in units.

    Raises ValueError where they differ in rows, length, dtype or device, or in an axis that is fixed.
    """
    if len(tensors) != len(inputs):
        raise ValueError(f"expected {len(inputs)} tensors, got {len(tensors)}")
    first = tensors[0]
    length = 0
    for tensor, axes in zip(tensors, inputs, strict=True):
        for size, axis in zip(tensor.shape[1:], axes, strict=False):
            if isinstance(axis, Length):
                length = length or size // axis.per_unit
        expected = shape(first.shape[0], axes, length)
        if tensor.shape != expected:
            raise ValueError(f"expected {list(expected)} (axes behind the rows: {axes}), got {list(tensor.shape)}")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(f"expected {first.dtype} on {first.device}, got {tensor.dtype} on {tensor.device}")
    return length
