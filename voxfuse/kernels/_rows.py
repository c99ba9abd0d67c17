"""Rows of a strided tensor: leading dimensions merged into two, so that kernels take slices without a copy."""

from __future__ import annotations

import torch

MAX_LEADING = 2


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below a positive size; ``triton.next_power_of_2`` takes 5 µs."""
    return 1 << (size - 1).bit_length()


def leading(x: torch.Tensor) -> tuple[int, int, int] | None:
    """(inner size, outer stride, inner stride) of the rows of a tensor, all dimensions but the last; in elements.

    Row r starts at (r // inner) · outer stride + (r % inner) · inner stride. None where more than two dimensions are
    left once those that continue each other in memory are merged.
    """
    if x.is_contiguous():  # nearly all are, and this is asked at every call
        width = x.shape[-1]
        return x.numel() // max(width, 1), 0, width
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
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


def leading_pair(x: torch.Tensor, other: torch.Tensor) -> tuple[int, int, int, int, int] | None:
    """(inner size, outer and inner stride of x, then of the other) for two tensors of one shape, or None."""
    one, two = leading(x), leading(other)
    if one is not None and two is not None and one[0] == two[0]:
        return (*one, *two[1:])
    if x.dim() == 3:  # they merge differently: left apart
        return x.shape[1], x.stride(0), x.stride(1), other.stride(0), other.stride(1)
    return None
