"""Packed weights: derived tensors that live beside a module, never in place of its parameters.

A pack is keyed by (data pointer, version, dtype, device) of the tensors that it was made from and rebuilt when any of
them changes, so ``.to()``, ``load_state_dict`` and in-place edits need no hook; it holds the sources' storages, so that
an address cannot come back with other contents. Inference tensors have no version and are packed anew at every call,
as all are inside somebody else's capture: such a pack has no contents before the graph is replayed.
One edit cannot be seen: in place through ``parameter.data``, which torch itself does not count. Held weakly by module:
state_dict, pickle and deepcopy never see packs, and a copied module packs for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

PackT = TypeVar("PackT")

_packs: WeakKeyDictionary[torch.nn.Module, dict[str, tuple[tuple[Any, ...], Any, list[Any]]]] = WeakKeyDictionary()
_lock = threading.Lock()
_collecting = threading.local()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.device


def pack(module: torch.nn.Module, name: str, sources: Sequence[torch.Tensor], build: Callable[[], PackT]) -> PackT:
    """``build()`` from ``sources``, remembered beside ``module`` under ``name`` until a source changes."""
    if torch.compiler.is_compiling():  # a traced graph holds the derivation itself
        return build()
    built = _pack(module, name, sources, build)
    collected: list[Any] | None = getattr(_collecting, "packs", None)
    if collected is not None:
        collected.append(built)
    return built


@contextmanager
def collected() -> Iterator[list[Any]]:
    """What ``pack`` gives this thread inside, for a graph to keep while it reads it."""
    outer = getattr(_collecting, "packs", None)
    packs: list[Any] = []
    _collecting.packs = packs
    try:
        yield packs
    finally:
        _collecting.packs = outer


def _pack(module: torch.nn.Module, name: str, sources: Sequence[torch.Tensor], build: Callable[[], PackT]) -> PackT:
    if any(source.is_inference() for source in sources):
        return build()
    key = tuple(_key(source) for source in sources)
    with _lock:
        held = _packs.setdefault(module, {}).get(name)
    if held is not None and held[0] == key:
        return held[1]
    with torch.inference_mode(False), torch.no_grad():  # a pack of this pack needs its version
        built = build()
    if not _finished(sources):
        return built
    with _lock:
        _packs.setdefault(module, {})[name] = (key, built, [source.untyped_storage() for source in sources])
    return built


def _finished(sources: Sequence[torch.Tensor]) -> bool:
    """Wait until what this thread's stream packs is there: from now on other streams read it. False inside somebody
    else's capture, which a wait would end: nothing is there before the graph is replayed."""
    for device in {source.device for source in sources if source.is_cuda}:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return False
            torch.cuda.current_stream().synchronize()
    return True
