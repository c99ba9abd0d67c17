"""The best peers: other libraries' kernels for a judged operation, as arms where they are installed.

A peer that cannot run is an arm that says why: not installed, not importable, or without such an operation. Nothing is
installed by this, and no peer is a dependency. Inductor is the arm ``compile``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from voxfuse.microbench.timer import Call

LIBRARIES = ("liger-kernel", "flashinfer-python", "flash-attn", "sglang-omni")  # searched for every operation


class Peer(NamedTuple):
    """A peer's operation. ``target`` is ``module:attribute``; ``adapt`` makes of it an arm that takes judged inputs."""

    distribution: str
    target: str
    adapt: Callable[[Any], Call]


def arms(peers: Iterable[Peer], lacks: str) -> dict[str, Call | str]:
    """An arm, or the reason for its absence, per library of ``LIBRARIES`` and per peer.

    ``lacks`` names the operation that was not found in the libraries without a peer.
    """
    absent: dict[str, Call | str] = {
        name: f"{name} ({_version(name) or 'not installed'}): no {lacks} was found in it" for name in LIBRARIES
    }
    return absent | {peer.distribution: _arm(peer) for peer in peers}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _arm(peer: Peer) -> Call | str:
    version = _version(peer.distribution)
    if version is None:
        return f"{peer.distribution} is not installed"
    module, _, attribute = peer.target.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except Exception as error:  # whatever an installation that does not fit this machine raises
        return f"{peer.distribution} {version}: {peer.target} cannot be loaded: {type(error).__name__}: {error}"[:300]
    return peer.adapt(found)
