"""CosyVoice3 (the repository FunAudioLLM/CosyVoice, no distribution): CausalHiFTGenerator from CUDA graphs.

The classes are those of a checkout (``_cosyvoice_import``), or of the driver's reference where only that is loaded. A
checkout has no release: its sources are compared with those of the main branch at commit ace7c47f41bb. The reference is
part of this package and comes with its patches.
"""

from __future__ import annotations

import sys

from voxfuse.patches import _hift
from voxfuse.patches._cosyvoice_import import ACTIVATION, CONVOLUTION, HIFT, load_cosyvoice3
from voxfuse.patches.guards import resolve, source_sha256
from voxfuse.patches.spec import StackPatches

REFERENCE = "voxfuse.e2e.stacks._cosyvoice3_reference"
DISTRIBUTION = "FunAudioLLM-CosyVoice"

COSYVOICE3 = StackPatches(
    name="cosyvoice3",
    distribution=DISTRIBUTION,
    modules=(HIFT, ACTIVATION, CONVOLUTION),
    load=load_cosyvoice3,
    sources={
        "ace7c47f41bb": {
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
    patches=_hift.patches(_hift.Modules(HIFT, ACTIVATION, CONVOLUTION, causal=True)),
)


def cosyvoice3() -> StackPatches:
    """The patches of the classes at hand."""
    upstream = hasattr(sys.modules.get(HIFT), "CausalHiFTGenerator")
    return COSYVOICE3 if upstream or REFERENCE not in sys.modules else _reference()


def _reference() -> StackPatches:
    patches = _hift.patches(_hift.Modules(REFERENCE, REFERENCE, REFERENCE, causal=True))
    paths = {path for patch in patches for path in patch.absorbs}
    return StackPatches(
        name="cosyvoice3",
        distribution=DISTRIBUTION,
        modules=(REFERENCE,),
        load=lambda: None,
        sources={"reference": {path: source_sha256(resolve(path).function) for path in paths}},
        patches=patches,
    )
