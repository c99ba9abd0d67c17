"""The patch engine and one file of patches per stack.

``engine`` plans and applies; ``patchset`` is what it returns; ``layers`` installs and restores attributes; ``guards``,
``seals`` and ``policy`` say why not; ``registry`` knows the stacks.
"""

from voxfuse.patches.engine import apply_patches
from voxfuse.patches.errors import PatchError, PatchWarning
from voxfuse.patches.patchset import PatchSet

__all__ = ["PatchError", "PatchSet", "PatchWarning", "apply_patches"]
