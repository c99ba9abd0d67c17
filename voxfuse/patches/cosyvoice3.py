"""CosyVoice3 (the repository FunAudioLLM/CosyVoice, no distribution): causal HiFT and language model.

The classes are those of a checkout (``_cosyvoice_import``), or of the driver's reference where only that is loaded. A
checkout has no release: its sources are compared with those of the main branch at commit ace7c47f41bb. The reference is
part of this package and comes with its patches.
"""

from __future__ import annotations

import sys

from voxfuse.patches import _cosyvoice_lm, _hift
from voxfuse.patches._cosyvoice_import import ACTIVATION, CONVOLUTION, F0_PREDICTOR, HIFT, load_cosyvoice3
from voxfuse.patches.cosyvoice import COMMIT, SOURCE_OF_CHECKOUT
from voxfuse.patches.guards import resolve, source_sha256
from voxfuse.patches.spec import StackPatches

REFERENCE = "voxfuse.e2e.stacks._cosyvoice3_reference"
DISTRIBUTION = "FunAudioLLM-CosyVoice"

COSYVOICE3 = StackPatches(
    name="cosyvoice3",
    distribution=DISTRIBUTION,
    modules=(HIFT, ACTIVATION, CONVOLUTION, F0_PREDICTOR, _cosyvoice_lm.LM),
    load=load_cosyvoice3,
    sources={
        COMMIT: SOURCE_OF_CHECKOUT
        | _cosyvoice_lm.SOURCES_OF_CHECKOUT
        | {
            f"{HIFT}:CausalHiFTGenerator.inference": "15fc6a4ccc20647e058433d28fa792940030698708f146b5f65657874f265e6d",
            f"{F0_PREDICTOR}:CausalConvRNNF0Predictor.forward": (
                "1a24edd2e6412103de1997b7a671e96a02498f116a879346f4f1a074f12910a4"
            ),
            f"{HIFT}:SineGen2._f02uv": "1fe169eb68ea2b4b85d059ffdd4e938a2655eb75f9a7da2a6e3c1560d470fc6d",
            f"{HIFT}:CausalHiFTGenerator.decode": "9be0606041d5f007c3f0b585c4c12c348ab17b35eaa33488fa067c7141181385",
            f"{HIFT}:CausalHiFTGenerator._stft": "7222fb613611191b600b35a96262b9a2df51269288c76eb79a29ae9455bc5c1a",
            f"{HIFT}:CausalHiFTGenerator._istft": "8b9f442af11cb4081c256644bd91d49db3a773a13e6e1e87c3db2e16d330835b",
            f"{HIFT}:ResBlock.forward": "e81554d4ad064a56e4d4a98110a890c226d7b31bde1d482df8bbc4e2d6e00fa7",
            f"{ACTIVATION}:Snake.forward": "b4bb6d855788163786649c2bd415bc7d6d00dd6db1c97ce6e5c0d208bab82a6b",
            f"{CONVOLUTION}:CausalConv1d.forward": _hift.CAUSAL_CONV_SHA256,
            f"{CONVOLUTION}:CausalConv1dUpsample.forward": (
                "218cb0f02266922cc5cb42ba57aa46071155365545a3532c2297ed7e3c22ea13"
            ),
            f"{CONVOLUTION}:CausalConv1dDownSample.forward": (
                "00e33afebb5d56082646f84030ca8e25342f1af95c1365a3fb55999c02afed2d"
            ),
        }
    },
    patches=(
        *_hift.patches(_hift.Modules(HIFT, ACTIVATION, CONVOLUTION, F0_PREDICTOR, causal=True)),
        *_cosyvoice_lm.PATCHES_OF_CHECKOUT,
    ),
)


def cosyvoice3() -> StackPatches:
    """The patches of the classes at hand."""
    upstream = hasattr(sys.modules.get(HIFT), "CausalHiFTGenerator")
    return COSYVOICE3 if upstream or REFERENCE not in sys.modules else _reference()


def _reference() -> StackPatches:
    patches = _hift.patches(_hift.Modules(REFERENCE, REFERENCE, REFERENCE, REFERENCE, causal=True))
    paths = {path for patch in patches for path in patch.absorbs}
    return StackPatches(
        name="cosyvoice3",
        distribution=DISTRIBUTION,
        modules=(REFERENCE,),
        load=lambda: None,
        sources={"reference": {path: source_sha256(resolve(path).function) for path in paths}},
        patches=patches,
    )
