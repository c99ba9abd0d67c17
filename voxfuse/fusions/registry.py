"""The fusion registry: every fusion by its stack-free name."""

from __future__ import annotations

from voxfuse.fusions.adain_resblock import ADAIN_LEAKY_RELU, ADAIN_SNAKE
from voxfuse.fusions.kokoro_text import TEXT_GRAPH
from voxfuse.records import Fusion

FUSIONS: dict[str, Fusion] = {item.name: item for item in (ADAIN_SNAKE, ADAIN_LEAKY_RELU, TEXT_GRAPH)}


def fusion(name: str) -> Fusion:
    """The fusion of that name. Raises KeyError that lists the known names."""
    if name not in FUSIONS:
        raise KeyError(f"no fusion named {name!r}; known: {', '.join(sorted(FUSIONS))}")
    return FUSIONS[name]
