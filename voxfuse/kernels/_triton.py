"""Triton where it is installed; otherwise stand-ins that let the kernel files be imported (and read) without it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # read by Triton when a kernel is decorated, so fixed here

try:
    import triton
    import triton.language as tl
except ImportError:

    def _undecorated(function: Any = None, **_: Any) -> Any:
        return function if function is not None else _undecorated

    triton = SimpleNamespace(jit=_undecorated, cdiv=lambda a, b: -(-a // b), __version__=None)
    tl = SimpleNamespace(constexpr=lambda value=None: value)

TRITON_VERSION: str | None = triton.__version__
