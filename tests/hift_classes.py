"""The real HiFT classes of CosyVoice2 (``cosyvoice-minicpmo``) and Chatterbox (``chatterbox-tts``), small and random.

Both distributions are installed without what they depend on, so two things of their imports are stood in for: SciPy's
``get_window``, the only function of it that HiFT calls, and the ``__init__`` files of chatterbox, which import the
whole stack.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

MODULES = {"cosyvoice2": "cosyvoice.hifigan.generator", "chatterbox": "chatterbox.models.s3gen.hifigan"}
PREDICTORS = {"cosyvoice2": "cosyvoice.hifigan.f0_predictor", "chatterbox": "chatterbox.models.s3gen.f0_predictor"}
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
    top = MODULES[stack].partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        return None
    if stack == "chatterbox":
        for name in ("chatterbox", "chatterbox.models", "chatterbox.models.s3gen"):
            if name not in sys.modules:
                sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("scipy") is None:
            scipy, signal = ModuleType("scipy"), ModuleType("scipy.signal")
            signal.get_window = _get_window
            patch.setitem(sys.modules, "scipy", scipy)
            patch.setitem(sys.modules, "scipy.signal", signal)
        importlib.import_module(PREDICTORS[stack])
        return importlib.import_module(MODULES[stack])


def _get_window(kind, samples, fftbins):
    assert kind == "hann" and fftbins
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(samples) / samples)


def upstream(stack):
    """The module with HiFTGenerator, or the test is skipped."""
    module = importable(stack)
    if module is None:
        pytest.skip(f"the distribution of {stack} is absent")
    return module


def generator(stack, **settings):
    """A HiFTGenerator with random parameters where upstream's initial ones hide a mistake: alphas and biases."""
    module = upstream(stack)
    settings = SMALL | settings
    predictor = sys.modules[PREDICTORS[stack]].ConvRNNF0Predictor(
        in_channels=settings.get("in_channels", 80), cond_channels=16
    )
    hift = module.HiFTGenerator(**settings, f0_predictor=predictor)
    with torch.no_grad():
        for name, parameter in hift.named_parameters():
            if name.endswith("alpha"):
                parameter.uniform_(0.3, 3)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
        predictor.classifier.bias.fill_(150.0)  # voiced
    return hift.eval()
