"""Stack drivers: how the gate loads each stack's real weights and makes it speak."""

from __future__ import annotations

from typing import Any

from voxfuse.e2e.stack import Stack
from voxfuse.e2e.stacks.kokoro import KokoroStack

_DRIVERS = {"kokoro": KokoroStack}


def driver(name: str, **options: Any) -> Stack:
    """A driver by stack name, nothing loaded yet; the options are those of the driver's class.

    Raises ValueError, naming the drivers there are, where the name is unknown.
    """
    if name not in _DRIVERS:
        raise ValueError(f"no driver for the stack {name!r}; there are drivers for: {', '.join(sorted(_DRIVERS))}")
    return _DRIVERS[name](**options)
