"""Copies of a function in other modules (``from module import function as name``), found and rewritten together."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any


def rebind(old: Iterable[Any], new: Any) -> list[str]:
    """Make every global of every loaded module that is one of ``old`` be ``new``; returns them as ``module.name``.

    Reads module dictionaries only, so a module's own ``__getattr__`` never runs; what is not a plain module in
    ``sys.modules`` is left alone.
    """
    stale = {id(value) for value in old if value is not new}
    rewritten = []
    for module_name, module in list(sys.modules.items()):
        if not issubclass(type(module), ModuleType):  # isinstance would ask the object itself
            continue
        namespace = ModuleType.__getattribute__(module, "__dict__")
        for name, value in list(namespace.items()):
            if id(value) in stale:
                namespace[name] = new
                rewritten.append(f"{module_name}.{name}")
    return rewritten
