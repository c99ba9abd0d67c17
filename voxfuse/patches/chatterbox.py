"""Chatterbox (PyPI ``chatterbox-tts``): T3's decoding, and the HiFT of its s3gen, a copy of CosyVoice's."""

from __future__ import annotations

import importlib

from voxfuse.patches import _chatterbox_t3, _hift
from voxfuse.patches.spec import StackPatches

HIFT = "chatterbox.models.s3gen.hifigan"
F0_PREDICTOR = "chatterbox.models.s3gen.f0_predictor"


def _load() -> None:
    for module in (HIFT, F0_PREDICTOR):
        importlib.import_module(module)


CHATTERBOX = StackPatches(
    name="chatterbox",
    distribution="chatterbox-tts",
    modules=(HIFT, F0_PREDICTOR, _chatterbox_t3.BACKEND),
    load=_load,
    sources={
        "0.1.7": {
            _chatterbox_t3.STEP: "6ca735d2ffe62729cafb53e7abb83a984a6b82e00faf110d6c4dd07ccc18ca21",
            _chatterbox_t3.INFERENCE: "6606b0cec2336f40e97c1d2786a9df584c73cc8dd4a33e4da33c9088c0486ee8",
            f"{HIFT}:HiFTGenerator.decode": "7610abe14cb63169559af0a66242ad2f518c090635d3ef49d5a270bbd54319f7",
            f"{HIFT}:HiFTGenerator._stft": "7222fb613611191b600b35a96262b9a2df51269288c76eb79a29ae9455bc5c1a",
            f"{HIFT}:HiFTGenerator._istft": "8b9f442af11cb4081c256644bd91d49db3a773a13e6e1e87c3db2e16d330835b",
            f"{HIFT}:ResBlock.forward": "e81554d4ad064a56e4d4a98110a890c226d7b31bde1d482df8bbc4e2d6e00fa7",
            f"{HIFT}:HiFTGenerator.inference": "72c987c7b4c4fbf019a98f23ac612915121f55e187cefa1ebe75e2a28eeb0ba4",
            f"{F0_PREDICTOR}:ConvRNNF0Predictor.forward": (
                "4adf3c88fae59be3de6be39ead30aa4150b2d66ade9d5e119b7b260caad28f2f"
            ),
            f"{HIFT}:SourceModuleHnNSF.forward": "813caba919c4c60b621d9880c48fd93ec1bfc1d5b18aa3707fa790aecedafd30",
            f"{HIFT}:SineGen.forward": "56640b400216b37300b9812c71bf395aab43af95cb38ee11cbf670ec4fd7a37b",
            f"{HIFT}:SineGen._f02uv": "1fe169eb68ea2b4b85d059ffdd4e938a2655eb75f9a7da2a6e3c1560d470fc6d",
            f"{HIFT}:Snake.forward": "d90fa41bf47f24f18cd4fc4c0af31b22b96fddee60c7de446cfeb0f2906d892d",
        }
    },
    patches=(
        *_hift.patches(_hift.Modules(HIFT, HIFT, HIFT, F0_PREDICTOR, sines="SineGen")),
        *_chatterbox_t3.PATCHES,
    ),
)
