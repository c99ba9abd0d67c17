"""CosyVoice2 (PyPI ``cosyvoice-minicpmo``, and the repository FunAudioLLM/CosyVoice): HiFT and language model.

A checkout of the repository has no distribution and so no release: its sources are compared with the tested ones. On
its main branch (commit ace7c47f41bb) the patched functions are the same text. Residual blocks of CosyVoice3 are of the
same class there, and served by the same replacement (cosyvoice3.py has the rest).
"""

from __future__ import annotations

from voxfuse.patches import _cosyvoice_lm, _hift
from voxfuse.patches._cosyvoice_import import ACTIVATION, CONVOLUTION, HIFT, load_cosyvoice2
from voxfuse.patches.spec import StackPatches

# The language model's module is not among what ``load`` imports: it needs torchaudio and transformers, and sets up
# logging. The planner imports it where the stack is named.
COSYVOICE2 = StackPatches(
    name="cosyvoice2",
    distribution="cosyvoice-minicpmo",
    modules=(HIFT, ACTIVATION, _cosyvoice_lm.LM),
    load=load_cosyvoice2,
    sources={
        "0.1.0": {
            **_cosyvoice_lm.SOURCES,
            f"{HIFT}:HiFTGenerator.decode": "7610abe14cb63169559af0a66242ad2f518c090635d3ef49d5a270bbd54319f7",
            f"{HIFT}:HiFTGenerator._stft": "7222fb613611191b600b35a96262b9a2df51269288c76eb79a29ae9455bc5c1a",
            f"{HIFT}:HiFTGenerator._istft": "8b9f442af11cb4081c256644bd91d49db3a773a13e6e1e87c3db2e16d330835b",
            f"{HIFT}:ResBlock.forward": "e81554d4ad064a56e4d4a98110a890c226d7b31bde1d482df8bbc4e2d6e00fa7",
            f"{ACTIVATION}:Snake.forward": "b4bb6d855788163786649c2bd415bc7d6d00dd6db1c97ce6e5c0d208bab82a6b",
        }
    },
    patches=(*_hift.patches(_hift.Modules(HIFT, ACTIVATION, CONVOLUTION)), *_cosyvoice_lm.PATCHES),
)
