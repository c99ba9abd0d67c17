"""The CosyVoice2 driver: its vocoder stage (upstream's HiFTGenerator at the released shapes)."""

from __future__ import annotations

from typing import Any

import torch

from voxfuse.e2e.stacks import _hift_import
from voxfuse.e2e.stacks._hift import HiftStack


class CosyVoice2Stack(HiftStack):
    """HiFT of CosyVoice2-0.5B; a checkpoint folder holds ``hift.pt``."""

    name = "cosyvoice2"
    distribution = "cosyvoice-minicpmo"
    highest_hz = 8000.0
    files = ("hift.pt",)

    def _classes(self) -> tuple[Any, Any]:
        return _hift_import.cosyvoice2()

    def _of_hift(self, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("generator.", ""): tensor for name, tensor in stored.items()}  # as upstream does
