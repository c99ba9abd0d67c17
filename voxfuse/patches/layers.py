"""Attribute layers: who replaced what where, so that sets of patches nest, overlap and leave in any order.

A *site* is one attribute of a class, a module (namespace) or an ``nn.Module`` instance. Every replacement on it is
built from the untouched function, never from the replacement below, so taking one out of the middle is safe; the top
one shows. The same fusion, target and backend on top is shared by its holders and leaves with the last of them.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import nn

from voxfuse.patches.aliases import rebind
from voxfuse.patches.errors import PatchWarning
from voxfuse.records import Backend

LOCK = threading.RLock()
MISSING: Final = object()
Owner = type | ModuleType | nn.Module

_ours: weakref.WeakSet[FunctionType] = weakref.WeakSet()
_sites: weakref.WeakKeyDictionary[Owner, dict[str, Site]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Replacement:
    """A function that stands in for an upstream one; ``key`` is the receipt that its fused calls count on."""

    fusion: str
    target: str
    backend: Backend
    key: str
    function: FunctionType

    def __post_init__(self) -> None:
        _ours.add(self.function)


@dataclass(eq=False)
class Layer:
    """One replacement on a site and the sets of patches (by token) that hold it."""

    replacement: Replacement
    holders: set[object] = field(default_factory=set)


class Site(ABC):
    """One attribute of one owner, with the layers on it."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self.name = name
        self.layers: list[Layer] = []
        self._pauses = 0

    @property
    def owner(self) -> Any:
        """The class, module or instance; None once an instance is gone."""
        return self._owner()

    @property
    def top(self) -> Replacement | None:
        return self.layers[-1].replacement if self.layers else None

    def held_by(self, holder: object) -> Replacement | None:
        """The replacement that a holder put or shares here."""
        return next((layer.replacement for layer in self.layers if holder in layer.holders), None)

    def join(self, holder: object, fusion: str, target: str, backend: Backend) -> Replacement | None:
        """Share the top layer where it is this very fusion, target and backend; None otherwise."""
        top = self.top
        if top is None or (top.fusion, top.target, top.backend) != (fusion, target, backend):
            return None
        self.layers[-1].holders.add(holder)
        return top

    def push(self, holder: object, replacement: Replacement) -> None:
        self.layers.append(Layer(replacement, {holder}))
        self._refresh()

    def remove(self, holder: object) -> None:
        """Let a holder go; a layer without holders is taken out, and what is then on top (or upstream's own) shows."""
        for layer in self.layers:
            layer.holders.discard(holder)
        gone = [layer.replacement.function for layer in self.layers if not layer.holders]
        self.layers = [layer for layer in self.layers if layer.holders]
        if gone:
            self._refresh(gone)
        self._forget_if_idle()

    def pause(self) -> None:
        """Show upstream's own until ``resume`` was called as often."""
        self._pauses += 1
        self._refresh()

    def resume(self) -> None:
        """Undo one ``pause``. What somebody else put here in the meantime stays, with a warning."""
        intruder = self.intruder()
        self._pauses -= 1
        if intruder is None:
            self._refresh()
        else:
            message = f"{self.name} was replaced by somebody else while voxfuse was paused; voxfuse leaves it there"
            warnings.warn(message, PatchWarning, stacklevel=3)
        self._forget_if_idle()

    def _forget_if_idle(self) -> None:
        owner = self.owner
        if not self.layers and not self._pauses and owner is not None:
            _sites.get(owner, {}).pop(self.name, None)

    def _refresh(self, gone: list[FunctionType] | None = None) -> None:
        if self.owner is None:
            return
        top = self.top
        if self._pauses or top is None:
            self._show_upstream(gone or [])
        else:
            self._show(top.function, gone or [])

    def intruder(self) -> Any:
        """What somebody else put here after us, or None."""
        if self.owner is None or self.top is None:
            return None
        value = self._value()
        return None if value is MISSING or self._expected(value) else value

    @abstractmethod
    def untouched(self) -> Any:
        """Upstream's own function, whatever is installed now."""

    @abstractmethod
    def _value(self) -> Any: ...

    @abstractmethod
    def _expected(self, value: Any) -> bool: ...

    @abstractmethod
    def _show(self, function: FunctionType, gone: list[FunctionType]) -> None: ...

    @abstractmethod
    def _show_upstream(self, gone: list[FunctionType]) -> None: ...


class ClassSite(Site):
    """A method of a class, own or inherited."""

    def __init__(self, owner: type, name: str) -> None:
        super().__init__(owner, name)
        self.original = vars(owner).get(name, MISSING)

    def untouched(self) -> Any:
        return untouched(self.owner, self.name)[1]

    def _value(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def _expected(self, value: Any) -> bool:
        top = self.top
        return value is (self.original if self._pauses or top is None else top.function)

    def _show(self, function: FunctionType, gone: list[FunctionType]) -> None:
        setattr(self.owner, self.name, function)

    def _show_upstream(self, gone: list[FunctionType]) -> None:
        if self.original is not MISSING:
            setattr(self.owner, self.name, self.original)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)


class FunctionSite(Site):
    """A function of a module, with every copy of it in other modules."""

    def __init__(self, owner: ModuleType, name: str) -> None:
        super().__init__(owner, name)
        self.original = vars(owner)[name]

    def untouched(self) -> Any:
        return self.original

    def _value(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def _expected(self, value: Any) -> bool:
        top = self.top
        return value is (self.original if self._pauses or top is None else top.function)

    def _show(self, function: FunctionType, gone: list[FunctionType]) -> None:
        # A module imported since then has copied what was installed, so all of these are looked for.
        rebind([self.original, *gone, *(layer.replacement.function for layer in self.layers)], function)

    def _show_upstream(self, gone: list[FunctionType]) -> None:
        rebind([*gone, *(layer.replacement.function for layer in self.layers)], self.original)


class InstanceSite(Site):
    """A method of one ``nn.Module``, shadowed in its ``__dict__`` by a bound method.

    Bound methods pickle as ``getattr(module, name)`` and deep-copy onto the copy, so a pickle needs no voxfuse and
    a copy stays patched. Upstream keeps nothing in that place (see ``shadow``), so restoring is removing.
    """

    def untouched(self) -> Any:
        return untouched(type(self.owner), self.name)[1]

    def _value(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def _expected(self, value: Any) -> bool:
        top = self.top
        expected = self.untouched() if self._pauses or top is None else top.function
        return isinstance(value, MethodType) and value.__func__ is expected

    def _show(self, function: FunctionType, gone: list[FunctionType]) -> None:
        vars(self.owner)[self.name] = MethodType(function, self.owner)

    def _show_upstream(self, gone: list[FunctionType]) -> None:
        if self._pauses:  # bound, since the class may be patched as well
            vars(self.owner)[self.name] = MethodType(self.untouched(), self.owner)
        else:
            vars(self.owner).pop(self.name, None)


def site(owner: Owner, name: str) -> Site:
    """The site of an attribute, made where there is none yet (which changes nothing)."""
    held = _sites.setdefault(owner, {})
    if name not in held:
        if isinstance(owner, type):
            held[name] = ClassSite(owner, name)
        elif isinstance(owner, ModuleType):
            held[name] = FunctionSite(owner, name)
        else:
            held[name] = InstanceSite(owner, name)
    return held[name]


def existing_site(owner: Owner, name: str) -> Site | None:
    """The site of an attribute where something is installed or paused, or None."""
    found = _sites.get(owner, {}).get(name)
    return found if found is not None and (found.layers or found._pauses) else None


def untouched(owner: type | ModuleType, name: str) -> tuple[type | ModuleType, Any]:
    """The class (along the MRO) or module that defines an attribute, and its value before voxfuse touched it.

    The raw value: functions unbound, static methods as such. Raises AttributeError where there is none.
    """
    for base in owner.__mro__ if isinstance(owner, type) else (owner,):
        held = existing_site(base, name)
        value = held.original if isinstance(held, ClassSite | FunctionSite) else vars(base).get(name, MISSING)
        if value is not MISSING:
            return base, value
    raise AttributeError(f"{owner.__name__} has no {name}")


def is_ours(value: Any) -> bool:
    """Whether a function, or the function of a bound method, is a replacement of voxfuse's."""
    function = value.__func__ if isinstance(value, MethodType) else value
    return isinstance(function, FunctionType) and function in _ours


def shadow(module: nn.Module, name: str) -> Any:
    """What somebody else keeps in ``module.__dict__[name]`` in place of the class's method, or MISSING.

    Replacements of voxfuse's (also of a deep copy) and the bound method that a pickle of a patched module leaves
    behind do not count: the class's own method does the same.
    """
    value = vars(module).get(name, MISSING)
    if value is MISSING or is_ours(value):
        return MISSING
    own = isinstance(value, MethodType) and value.__self__ is module
    return MISSING if own and value.__func__ is untouched(type(module), name)[1] else value
