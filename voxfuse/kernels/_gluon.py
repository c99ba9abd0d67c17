"""Gluon (Triton with explicit layouts and shared memory) where it is installed; else stand-ins as in ``_triton``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from voxfuse.kernels._triton import INTERPRETED, TRITON_VERSION

try:
    if INTERPRETED or TRITON_VERSION is None or tuple(map(int, TRITON_VERSION.split(".")[:2])) < (3, 6):
        raise ImportError("Gluon has no interpreter, and Triton 3.5's is another language")
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper

    barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.6 has the second alone
except ImportError:

    def _undecorated(function: Any = None, **_: Any) -> Any:
        return function if function is not None else _undecorated

    gluon = SimpleNamespace(jit=_undecorated)
    gl = SimpleNamespace(constexpr=lambda value=None: value)
    hopper = barrier = None
