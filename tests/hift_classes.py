"""The real HiFT classes of CosyVoice2 (``cosyvoice-minicpmo``) and Chatterbox (``chatterbox-tts``), small and random;
those of CosyVoice3 from the checkout that COSYVOICE_HOME names (and then CosyVoice2's too), else our reference.

Both distributions are installed without what they depend on: the drivers' loader stands in for what is absent.
"""

import os
import sys

import pytest
import torch

from voxfuse.e2e.stacks import _hift_import
from voxfuse.patches import _cosyvoice_import
from voxfuse.patches.cosyvoice3 import REFERENCE

CHECKOUT = bool(os.environ.get(_cosyvoice_import.HOME))
MODULES = {
    "cosyvoice2": _cosyvoice_import.HIFT,
    "chatterbox": "chatterbox.models.s3gen.hifigan",
    "cosyvoice3": _cosyvoice_import.HIFT if CHECKOUT else REFERENCE,
}
PREDICTORS = {
    "cosyvoice2": _cosyvoice_import.F0_PREDICTOR,
    "chatterbox": "chatterbox.models.s3gen.f0_predictor",
    "cosyvoice3": _cosyvoice_import.F0_PREDICTOR if CHECKOUT else REFERENCE,
}
SHORT_NOISE_SAMPLES = 30 * 24_000  # of the reference: upstream's five minutes take half a second to draw
BINS = 20
SMALL = {
    "in_channels": BINS,
    "base_channels": 32,
    "nb_harmonics": 4,
    "sampling_rate": 24_000,
    "upsample_rates": [4, 3],
    "upsample_kernel_sizes": [8, 7],
    "resblock_kernel_sizes": [3, 7, 11],
    "source_resblock_kernel_sizes": [7, 11],
    "source_resblock_dilation_sizes": [[1, 3, 5]] * 2,
}
RELEASED = {
    "sampling_rate": 24_000,
    "upsample_rates": [8, 5, 3],
    "upsample_kernel_sizes": [16, 11, 7],
    "source_resblock_kernel_sizes": [7, 7, 11],
    "source_resblock_dilation_sizes": [[1, 3, 5]] * 3,
}


def importable(stack):
    """Whether the distribution of a stack is installed; then its HiFT module is imported and returned, else None."""
    try:
        generator, _ = getattr(_hift_import, stack)()
    except ImportError:
        return None
    module = sys.modules[generator.__module__]
    if module.__name__ == REFERENCE:
        module.NOISE_SAMPLES = SHORT_NOISE_SAMPLES
    return module


def upstream(stack):
    """The module with HiFTGenerator, or the test is skipped."""
    module = importable(stack)
    if module is None:
        pytest.skip(f"the distribution of {stack} is absent")
    return module


def generator(stack, cond_channels=16, **settings):
    """A HiFTGenerator with random parameters where upstream's initial ones hide a mistake: alphas and biases."""
    module = upstream(stack)
    causal = "Causal" if stack == "cosyvoice3" else ""
    settings = SMALL | ({"nb_harmonics": 8} if causal else {}) | settings  # its random phases are of nine
    predictor = vars(sys.modules[PREDICTORS[stack]])[f"{causal}ConvRNNF0Predictor"](
        in_channels=settings.get("in_channels", 80), cond_channels=cond_channels
    )
    hift = vars(module)[f"{causal}HiFTGenerator"](**settings, f0_predictor=predictor)
    with torch.no_grad():
        for name, parameter in hift.named_parameters():
            if name.endswith("alpha"):
                parameter.uniform_(0.3, 3)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
        predictor.classifier.bias.fill_(150.0)  # voiced
    return hift.eval()


def released(stack):
    """A generator of the released sizes on the GPU, the same at every call."""
    torch.manual_seed(0)
    return generator(stack, **RELEASED, in_channels=80, base_channels=512, nb_harmonics=8).cuda()
