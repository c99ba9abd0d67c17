"""Rows of a strided tensor: leading dimensions merged into two, so that kernels take slices without a copy."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LEADING = 2


def leading(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """(inner size, outer stride, inner stride) of the rows of a tensor, all dimensions but the last; in elements.

    Row r starts at (r // inner) · outer stride + (r % inner) · inner stride. None where more than two dimensions are
    left once those that continue each other in memory are merged.
    """
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == size * stride:
            sizes[-1] *= size
            steps[-1] = stride
        else:
            sizes.append(size)
            steps.append(stride)
    if len(sizes) > MAX_LEADING:
        return None
    if not sizes:
        return 1, 0, 0
    if len(sizes) == 1:
        return sizes[0], 0, steps[0]
    return sizes[1], steps[0], steps[1]


def leading_pair(
    shape: Sequence[int], strides: Sequence[int], others: Sequence[int]
) -> tuple[int, int, int, int, int] | None:
    """(inner size, outer and inner stride of one tensor, then of the other) for two tensors of one shape, or None."""
    one, other = leading(shape, strides), leading(shape, others)
    if one is not None and other is not None and one[0] == other[0]:
        return (*one, *other[1:])
    if len(shape) == 3:  # they merge differently: left apart
        return shape[1], strides[0], strides[1], others[0], others[1]
    return None
