"""The CosyVoice3 driver: its vocoder stage (CausalHiFTGenerator at the released shapes).

The classes are upstream's where COSYVOICE_HOME names a checkout of FunAudioLLM/CosyVoice (or one is importable), else
those of ``_cosyvoice3_reference``: no distribution has them.
"""

from __future__ import annotations

from typing import Any

from voxfuse.e2e.stacks import _hift_import
from voxfuse.e2e.stacks.cosyvoice2 import CosyVoice2Stack
from voxfuse.patches.cosyvoice3 import DISTRIBUTION


class CosyVoice3Stack(CosyVoice2Stack):
    """HiFT of Fun-CosyVoice3-0.5B; a checkpoint folder holds ``hift.pt``."""

    name = "cosyvoice3"
    distribution = DISTRIBUTION
    highest_hz = 12_000.0

    def _classes(self) -> tuple[Any, Any]:
        return _hift_import.cosyvoice3()
