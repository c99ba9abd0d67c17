"""The fixtures that every test shares do what they say."""

import pytest
import torch


@pytest.mark.usefixtures("poisoned_empty")
def test_fresh_memory_is_poisoned() -> None:
    like = torch.zeros(3, 2)
    fresh = (
        torch.empty(3, dtype=torch.bfloat16),
        torch.empty_like(like),
        like.new_empty(4),
        torch.empty_strided((2,), (1,)),
    )
    assert all(tensor.isnan().all() for tensor in fresh)
    assert torch.empty(2, dtype=torch.int32).shape == (2,)
    assert torch.zeros(2).eq(0).all()


def test_memory_is_not_poisoned_afterwards() -> None:
    assert torch.empty.__name__ == "empty"
    assert torch.empty_like is torch._C._VariableFunctions.empty_like
