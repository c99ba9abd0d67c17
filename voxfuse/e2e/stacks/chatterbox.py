"""The Chatterbox driver: its vocoder stage (the HiFTGenerator of s3gen at the released shapes)."""

from __future__ import annotations

from typing import Any

import torch

from voxfuse.e2e.stacks import _hift_import
from voxfuse.e2e.stacks._hift import HiftStack

PREFIX = "mel2wav."


class ChatterboxStack(HiftStack):
    """HiFT of Chatterbox; a checkpoint folder holds ``s3gen.safetensors`` or ``s3gen.pt``."""

    name = "chatterbox"
    distribution = "chatterbox-tts"
    highest_hz = 8000.0
    files = ("s3gen.safetensors", "s3gen.pt")

    def _classes(self) -> tuple[Any, Any]:
        return _hift_import.chatterbox()

    def _of_hift(self, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.removeprefix(PREFIX): tensor for name, tensor in stored.items() if name.startswith(PREFIX)}
