"""Stack drivers: how the gate loads each stack's weights and makes it speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from voxfuse.e2e.stack import Stack
from voxfuse.e2e.stacks.chatterbox import ChatterboxStack
from voxfuse.e2e.stacks.cosyvoice2 import CosyVoice2Stack
from voxfuse.e2e.stacks.cosyvoice3 import CosyVoice3Stack
from voxfuse.e2e.stacks.kokoro import KokoroStack

_DRIVERS: dict[str, Callable[..., Stack]] = {
    "kokoro": KokoroStack,
    "cosyvoice2": CosyVoice2Stack,
    "cosyvoice3": CosyVoice3Stack,
    "chatterbox": ChatterboxStack,
}


def driver(name: str, **options: Any) -> Stack:
    """A driver by stack name, nothing loaded yet; the options are those of the driver's class.

    Raises ValueError, naming the drivers there are, where the name is unknown.
    """
    if name not in _DRIVERS:
        raise ValueError(f"no driver for the stack {name!r}; there are drivers for: {', '.join(sorted(_DRIVERS))}")
    return _DRIVERS[name](**options)
