"""Fused Triton kernels for open text-to-speech stacks. ``apply_patches()`` turns on what the ledger has proven."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from voxfuse._version import VERSION as __version__

if TYPE_CHECKING:
    from voxfuse.fusions.graph_runner import capturing
    from voxfuse.patches.engine import apply_patches
    from voxfuse.patches.patchset import PatchSet

__all__ = ["PatchSet", "__version__", "apply_patches", "capturing"]

if os.environ.get("VOXFUSE_BACKEND") == "interpreter":
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is decorated, so before any kernel is imported


def __getattr__(name: str) -> Any:
    if name in ("apply_patches", "PatchSet"):
        from voxfuse import patches  # late: it imports torch and Triton

        return getattr(patches, name)
    if name == "capturing":
        from voxfuse.fusions import graph_runner

        return graph_runner.capturing
    raise AttributeError(f"module 'voxfuse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
