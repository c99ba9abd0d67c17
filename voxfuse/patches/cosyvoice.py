"""CosyVoice2 (PyPI ``cosyvoice-minicpmo``, or a checkout of FunAudioLLM/CosyVoice): HiFT and language model.

A checkout has no distribution and so no release: its sources are compared with those of the main branch at commit
ace7c47f41bb, which has other names in its source. Residual blocks and sources of CosyVoice3 are of the same classes
there, and served by the same replacements (cosyvoice3.py has the rest).
"""

from __future__ import annotations

import os
import sys

from voxfuse.patches import _cosyvoice_lm, _hift
from voxfuse.patches._cosyvoice_import import ACTIVATION, CONVOLUTION, F0_PREDICTOR, HIFT, HOME, load_cosyvoice2
from voxfuse.patches.guards import installed_version
from voxfuse.patches.spec import Patch, StackPatches

DISTRIBUTION = "cosyvoice-minicpmo"
COMMIT = "ace7c47f41bb"
SHARED = {  # the same text in both
    f"{HIFT}:HiFTGenerator.decode": "7610abe14cb63169559af0a66242ad2f518c090635d3ef49d5a270bbd54319f7",
    f"{HIFT}:HiFTGenerator._stft": "7222fb613611191b600b35a96262b9a2df51269288c76eb79a29ae9455bc5c1a",
    f"{HIFT}:HiFTGenerator._istft": "8b9f442af11cb4081c256644bd91d49db3a773a13e6e1e87c3db2e16d330835b",
    f"{HIFT}:ResBlock.forward": "e81554d4ad064a56e4d4a98110a890c226d7b31bde1d482df8bbc4e2d6e00fa7",
    f"{ACTIVATION}:Snake.forward": "b4bb6d855788163786649c2bd415bc7d6d00dd6db1c97ce6e5c0d208bab82a6b",
    f"{HIFT}:HiFTGenerator.inference": "72c987c7b4c4fbf019a98f23ac612915121f55e187cefa1ebe75e2a28eeb0ba4",
    f"{F0_PREDICTOR}:ConvRNNF0Predictor.forward": "4adf3c88fae59be3de6be39ead30aa4150b2d66ade9d5e119b7b260caad28f2f",
    f"{HIFT}:SineGen2._f02uv": "1fe169eb68ea2b4b85d059ffdd4e938a2655eb75f9a7da2a6e3c1560d470fc6d",
}
SOURCE_OF_CHECKOUT = {
    f"{HIFT}:SourceModuleHnNSF.forward": "4428bca61347e4f499b12a31e79d3ff15df2d2232d0c7407248b2baeb2fecd41",
    f"{HIFT}:SineGen2.forward": "78600e4da72e78ca7686418f572a9e78d500d81e1048b3658f05afdd10b71e30",
    f"{HIFT}:SineGen2._f02sine": "b8986739cf8753f7cb4bf5367966a51dd97d39603036ebde0048d2e8eec5ec82",
}


def _stack(version: str, source: str, sources: dict[str, str], language_model: tuple[Patch, ...]) -> StackPatches:
    # The language model's module is not among what ``load`` imports: it needs torchaudio and transformers, and sets up
    # logging. The planner imports it where the stack is named.
    return StackPatches(
        name="cosyvoice2",
        distribution=DISTRIBUTION,
        modules=(HIFT, ACTIVATION, F0_PREDICTOR, _cosyvoice_lm.LM),
        load=load_cosyvoice2,
        sources={version: SHARED | sources},
        patches=(
            *_hift.patches(_hift.Modules(HIFT, ACTIVATION, CONVOLUTION, F0_PREDICTOR, source)),
            *language_model,
        ),
    )


RELEASED = _stack(
    "0.1.0",
    "SourceModuleHnNSF2",
    {
        f"{HIFT}:SourceModuleHnNSF2.forward": "ca8db779f56cd9fc54b732295c828be11cb057d03583a14cba4076cbc1bd60c7",
        f"{HIFT}:SineGen2.forward": "2c125f9099f16418556ac2f8c386ff3bab5e0499f8f9b371bc0125664a659eb4",
        f"{HIFT}:SineGen2._f02sine": "6282a6c02ee68a2bbc5cee8d9f5ccfd8897f5f6876fcff9ed28ab81b7b3c2d9c",
    }
    | _cosyvoice_lm.SOURCES,
    _cosyvoice_lm.PATCHES,
)
CHECKOUT = _stack(
    COMMIT,
    "SourceModuleHnNSF",
    SOURCE_OF_CHECKOUT | _cosyvoice_lm.SOURCES_OF_CHECKOUT,
    _cosyvoice_lm.PATCHES_OF_CHECKOUT,
)


def cosyvoice2() -> StackPatches:
    """The patches of the classes at hand: loaded already, else of the checkout named, else as installed."""
    loaded = sys.modules.get(HIFT)
    if loaded is not None:
        return CHECKOUT if hasattr(loaded, "CausalHiFTGenerator") else RELEASED
    return RELEASED if installed_version(DISTRIBUTION) and not os.environ.get(HOME) else CHECKOUT
