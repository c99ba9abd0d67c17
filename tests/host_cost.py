"""The host cost of a call on a GPU machine, and how much of it is allowed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

HOST_US = 25.0


def host_us(call: Callable[[], object]) -> float:
    """Least host time of a call in µs over five rounds, without waiting for the GPU."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(400):
            call()
        best = min(best, (time.perf_counter() - start) / 400 * 1e6)
    return best


def assert_cheap(call: Callable[[], object]) -> None:
    """25 µs on a host that launches an eager kernel in 5 µs; on a slower one (a virtual machine) in proportion."""
    x = torch.ones(64, device="cuda")
    limit = HOST_US * max(1.0, host_us(lambda: x + 1.0) / 5.0)
    cost = host_us(call)
    assert cost <= limit, f"{cost:.1f} µs a call, at most {limit:.1f} allowed"
