"""Packed weights: derived tensors that live beside a module, never in place of its parameters.

A pack is keyed by (data pointer, version, dtype, device) of the tensors that it was made from and rebuilt when any of
them changes, so ``.to()``, ``load_state_dict`` and in-place edits need no hook. Held weakly by module: state_dict,
pickle and deepcopy never see packs, and a copied module packs for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

PackT = TypeVar("PackT")

_packs: WeakKeyDictionary[torch.nn.Module, dict[str, tuple[tuple[Any, ...], Any]]] = WeakKeyDictionary()
_lock = threading.Lock()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version  # inference tensors do not track versions
    return tensor.data_ptr(), version, tensor.dtype, tensor.device


def pack(module: torch.nn.Module, name: str, sources: Sequence[torch.Tensor], build: Callable[[], PackT]) -> PackT:
    """``build()`` from ``sources``, remembered beside ``module`` under ``name`` until a source changes."""
    if torch.compiler.is_compiling():  # a traced graph holds the derivation itself
        return build()
    key = tuple(_key(source) for source in sources)
    with _lock:
        held = _packs.setdefault(module, {}).get(name)
    if held is not None and held[0] == key:
        return held[1]
    with torch.no_grad():
        built = build()
    with _lock:
        _packs.setdefault(module, {})[name] = (key, built)
    return built
