"""What a stack file declares: which upstream callables a fusion replaces, with their tested sources, as data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from voxfuse.kernels._op import Run
from voxfuse.records import Backend, Fusion

Build = Callable[[Callable[..., Any], Run], Callable[..., Any]]

_NOTATION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Patch:
    """One replacement.

    ``target`` names a method (``package.module:Class.method``) or a function (``package.module:function``).
    ``absorbs`` lists every upstream callable whose behaviour the replacement takes over, in the same notation, the
    target included: each is hashed. ``build(original, run)`` returns the replacement, a new function of the same
    signature; it runs its fused ops with ``run`` and may call ``original``, which is always the untouched upstream
    function (for a method: unbound, ``self`` first). ``backends`` are those that the replacement can run with.
    ``by_name_only``: why it can be applied to the class alone, not to a model instance, where that is so. Where
    several patches of a stack name one target, the first that is wanted and fits serves it.

    Raises ValueError where a name is malformed, ``absorbs`` lacks the target, or the target is torch's own.
    """

    fusion: Fusion
    target: str
    absorbs: tuple[str, ...]
    build: Build
    backends: tuple[Backend, ...] = get_args(Backend)
    by_name_only: str | None = None

    def __post_init__(self) -> None:
        for name in (self.target, *self.absorbs):
            if not _NOTATION.fullmatch(name):
                raise ValueError(f"expected 'package.module:Class.method' or 'package.module:function', got {name!r}")
        if self.target.partition(":")[0].partition(".")[0] == "torch":
            raise ValueError(f"{self.target}: torch is never patched; name the stack's own class or function")
        if self.target not in self.absorbs:
            raise ValueError(f"absorbs must list the target {self.target} too")


@dataclass(frozen=True)
class StackPatches:
    """All patches of one stack.

    ``sources`` maps each tested release of ``distribution`` to the SHA-256 of the source of every absorbed callable
    (``guards.source_sha256``). ``modules`` are the modules that hold the targets; ``load`` imports them (a stack whose
    package import pulls a text front end may import them another way) and raises ImportError where the stack is absent.

    Raises ValueError where a tested release lacks a hash.
    """

    name: str
    distribution: str
    modules: tuple[str, ...]
    load: Callable[[], None]
    sources: dict[str, dict[str, str]]
    patches: tuple[Patch, ...] = field(default=())

    def __post_init__(self) -> None:
        for version, hashes in self.sources.items():
            for patch in self.patches:
                for name in patch.absorbs:
                    if name not in hashes:
                        raise ValueError(f"{self.name} {version}: sources has no hash of {name}")
