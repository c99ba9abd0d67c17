"""The fusion registry: every fusion by its stack-free name."""

from __future__ import annotations

from voxfuse.fusions._projections import SKINNY_GEMM
from voxfuse.fusions.adain_conv_block import ADAIN_CONV_BLOCK
from voxfuse.fusions.adain_resblock import ADAIN_LEAKY_RELU, ADAIN_SNAKE
from voxfuse.fusions.decode_graph import DECODE_GRAPH
from voxfuse.fusions.decode_step import SMALL_ATTENTION
from voxfuse.fusions.decoder_graph import DECODER_GRAPH
from voxfuse.fusions.hift_graph import HIFT_GRAPH
from voxfuse.fusions.hift_source_graph import HIFT_SOURCE_GRAPH
from voxfuse.fusions.kokoro_text import TEXT_GRAPH
from voxfuse.fusions.snake_conv_block import SNAKE_CONV_BLOCK
from voxfuse.fusions.source import SINE_SOURCE
from voxfuse.fusions.spectral import ISTFT_POLAR, STFT_POLAR
from voxfuse.fusions.speech_sampler import RAS_SAMPLING
from voxfuse.fusions.transformers_decoder import GQA_ATTENTION, RMS_NORM, SWIGLU
from voxfuse.records import Fusion

FUSIONS: dict[str, Fusion] = {
    item.name: item
    for item in (
        TEXT_GRAPH,
        DECODER_GRAPH,
        ADAIN_CONV_BLOCK,
        ADAIN_SNAKE,
        ADAIN_LEAKY_RELU,
        STFT_POLAR,
        ISTFT_POLAR,
        SINE_SOURCE,
        HIFT_GRAPH,
        HIFT_SOURCE_GRAPH,
        SNAKE_CONV_BLOCK,
        DECODE_GRAPH,
        RAS_SAMPLING,
        RMS_NORM,
        SWIGLU,
        GQA_ATTENTION,
        SKINNY_GEMM,
        SMALL_ATTENTION,
    )
}


def fusion(name: str) -> Fusion:
    """The fusion of that name. Raises KeyError that lists the known names."""
    if name not in FUSIONS:
        raise KeyError(f"no fusion named {name!r}; known: {', '.join(sorted(FUSIONS))}")
    return FUSIONS[name]
