"""Import the vocoder of a stack alone, where the rest of the stack's dependencies are absent.

Two things of these imports are stood in for: SciPy's ``get_window``, all of it that HiFT uses, while the module is
imported; and the ``__init__`` files of chatterbox, which import the whole stack (a process that has imported chatterbox
already keeps its own).
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from voxfuse.patches._cosyvoice_import import load_cosyvoice2, load_cosyvoice3

CHATTERBOX = "chatterbox.models.s3gen"
REFERENCE = "voxfuse.e2e.stacks._cosyvoice3_reference"


def cosyvoice2() -> tuple[Any, Any]:
    """HiFTGenerator and ConvRNNF0Predictor. Raises ImportError where they are nowhere."""
    with _with_get_window():
        load_cosyvoice2()
    return _of("cosyvoice.hifigan.generator", "HiFTGenerator"), _of("cosyvoice.hifigan.f0_predictor", _PREDICTOR)


def cosyvoice3() -> tuple[Any, Any]:
    """CausalHiFTGenerator and its f0 predictor: of upstream where they are at hand, else of our reference.

    Raises ImportError where COSYVOICE_HOME names something that is not a checkout.
    """
    try:
        with _with_get_window():
            load_cosyvoice3()
        generator, predictor = "cosyvoice.hifigan.generator", "cosyvoice.hifigan.f0_predictor"
    except ImportError as error:
        if "COSYVOICE_HOME=" in str(error):  # named, and wrong
            raise
        importlib.import_module(REFERENCE)
        generator = predictor = REFERENCE
    return _of(generator, "CausalHiFTGenerator"), _of(predictor, f"Causal{_PREDICTOR}")


def chatterbox() -> tuple[Any, Any]:
    """HiFTGenerator and ConvRNNF0Predictor of s3gen. Raises ImportError where chatterbox-tts is not installed."""
    if "chatterbox" not in sys.modules:
        if importlib.util.find_spec("chatterbox") is None:
            raise ImportError("chatterbox is not installed: pip install --no-deps chatterbox-tts==0.1.7")
        for name in ("chatterbox", "chatterbox.models", CHATTERBOX):
            spec = importlib.util.find_spec(name)
            assert spec is not None, f"{name} is part of chatterbox-tts"
            sys.modules[name] = importlib.util.module_from_spec(spec)
    with _with_get_window():
        for part in ("hifigan", "f0_predictor"):
            importlib.import_module(f"{CHATTERBOX}.{part}")
    return _of(f"{CHATTERBOX}.hifigan", "HiFTGenerator"), _of(f"{CHATTERBOX}.f0_predictor", _PREDICTOR)


_PREDICTOR = "ConvRNNF0Predictor"


def _of(module: str, name: str) -> Any:
    return vars(sys.modules[module])[name]


@contextmanager
def _with_get_window() -> Iterator[None]:
    """Stands in for ``scipy.signal`` while something is imported, where SciPy is absent."""
    if "scipy" in sys.modules or importlib.util.find_spec("scipy") is not None:
        yield
        return
    scipy, signal = ModuleType("scipy"), ModuleType("scipy.signal")
    vars(signal)["get_window"] = _get_window
    sys.modules |= {"scipy": scipy, "scipy.signal": signal}
    try:
        yield
    finally:
        for name in ("scipy", "scipy.signal"):
            del sys.modules[name]


def _get_window(kind: str, samples: int, fftbins: bool) -> np.ndarray:
    """The periodic Hann window, as SciPy gives it. Raises NotImplementedError for any other."""
    if kind != "hann" or not fftbins:
        raise NotImplementedError(f"without SciPy there is the periodic Hann window only, asked for {kind}")
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(samples) / samples)
