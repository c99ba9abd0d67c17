"""Leading dimensions merged into two: every row is found where indexing finds it."""

import pytest
import torch

from voxfuse.kernels._rows import leading, leading_pair, power_of_two

LAYOUTS = {
    "contiguous": torch.zeros(3, 4, 8),
    "one row": torch.zeros(8),
    "last token": torch.zeros(3, 4, 8)[:, -1:],
    "heads of a projection": torch.zeros(2, 3, 48)[..., :32].view(2, 3, 4, 8),
    "transposed": torch.zeros(2, 4, 3, 8).transpose(1, 2)[:1],
    "expanded": torch.zeros(1, 8).expand(5, 8),
}


def starts(x, rows):
    inner, outer_stride, inner_stride = rows
    count = x.numel() // x.shape[-1]
    return [row // inner * outer_stride + row % inner * inner_stride for row in range(count)]


def expected(x):
    """Offsets of the first element of each row, by torch's own strides."""
    offsets = torch.zeros(())
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return offsets.flatten().int().tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_where_strides_say(name):
    x = LAYOUTS[name]
    assert starts(x, leading(x)) == expected(x)


def test_three_dimensions_that_do_not_merge_are_refused():
    assert leading(torch.zeros(4, 5, 6, 8).permute(2, 1, 0, 3)) is None


def test_a_pair_shares_one_inner_size():
    x, other = torch.zeros(2, 3, 8), torch.zeros(2, 4, 8)[:, 1:]
    inner, *strides = leading_pair(x, other)
    assert starts(x, (inner, *strides[:2])) == expected(x) and starts(other, (inner, *strides[2:])) == expected(other)
    assert leading_pair(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 4, 8)[:, :, 1:]) is None


def test_powers_of_two():
    assert [power_of_two(size) for size in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
