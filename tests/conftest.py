"""Fixtures of all tests. Kernels run in Triton's interpreter unless VOXFUSE_TEST_GPU=1 asks for the GPU."""

# ruff: noqa: E402 - the environment must be set before torch and Triton are imported
import os

if os.environ.get("VOXFUSE_TEST_GPU") != "1":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: read when a kernel is decorated
for _switch in (
    "VOXFUSE",
    "VOXFUSE_BACKEND",
    "VOXFUSE_FUSIONS",
    "VOXFUSE_STRICT",
    "VOXFUSE_RECEIPTS",
    "VOXFUSE_LEDGER",
):
    os.environ.pop(_switch, None)

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from toystack import ToyStack

SEED = 20260


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every test, whatever ran before it."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def no_patch_left() -> Iterator[None]:
    """A test that leaves Kokoro's classes patched would count its calls on another test's receipts."""
    yield
    istftnet = sys.modules.get("kokoro.istftnet")
    if istftnet is not None:
        for owner, name in ((istftnet.AdaINResBlock1, "forward"), (istftnet.AdainResBlk1d, "_residual")):
            assert vars(owner)[name].__code__.co_filename == istftnet.__file__, f"{owner.__name__}.{name} is patched"


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN: an element that a kernel forgets to write cannot look right by chance."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            fresh = allocate(*args, **kwargs)
            with torch.no_grad():
                return fresh.fill_(torch.nan) if fresh.is_floating_point() or fresh.is_complex() else fresh

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyStack]:
    """A small upstream package with patches, registered as a stack for this test only."""
    stack = ToyStack(tmp_path)
    stack.register(monkeypatch)
    yield stack
    stack.forget()
