"""What a stack file declares: which upstream callables a fusion replaces, with their tested sources, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from voxfuse.kernels._op import Run
from voxfuse.records import Fusion

Build = Callable[[Callable[..., Any], Run], Callable[..., Any]]


@dataclass(frozen=True)
class Patch:
    """One replacement.

    ``target`` names a method (``package.module:Class.method``) or a function (``package.module:function``).
    ``absorbs`` lists every upstream callable whose behaviour the replacement takes over, in the same notation, the
    target included: each is hashed. ``build(original, run)`` returns the replacement, of the same signature; it runs
    its fused ops with ``run`` and may call ``original``.
    """

    fusion: Fusion
    target: str
    absorbs: tuple[str, ...]
    build: Build


@dataclass(frozen=True)
class StackPatches:
    """All patches of one stack.

    ``sources`` maps each tested release of ``distribution`` to the SHA-256 of the source of every absorbed callable.
    ``modules`` are the modules that hold the targets; ``load`` imports them (a stack whose package import pulls a text
    front end may import them another way) and raises ImportError where the stack is absent.
    """

    name: str
    distribution: str
    modules: tuple[str, ...]
    load: Callable[[], None]
    sources: dict[str, dict[str, str]]
    patches: tuple[Patch, ...] = field(default=())
