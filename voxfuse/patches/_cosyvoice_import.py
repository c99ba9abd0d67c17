"""Import CosyVoice's vocoder: from the checkout of FunAudioLLM/CosyVoice that COSYVOICE_HOME names, else as installed.

CosyVoice3's classes are in no distribution, and ``cosyvoice-minicpmo`` installs a package of the same name with
CosyVoice2's alone, so where the variable is set both stacks come from the checkout.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

HOME = "COSYVOICE_HOME"
HIFT = "cosyvoice.hifigan.generator"
F0_PREDICTOR = "cosyvoice.hifigan.f0_predictor"
ACTIVATION = "cosyvoice.transformer.activation"
CONVOLUTION = "cosyvoice.transformer.convolution"


def load_cosyvoice2() -> None:
    """Import the modules of HiFTGenerator. Raises ImportError where they are nowhere, or COSYVOICE_HOME is wrong."""
    use_checkout()
    for module in (HIFT, F0_PREDICTOR, ACTIVATION):
        importlib.import_module(module)


def load_cosyvoice3() -> None:
    """Import the modules of CausalHiFTGenerator. Raises ImportError where the cosyvoice at hand has no such class."""
    load_cosyvoice2()
    module = sys.modules[HIFT]
    if not hasattr(module, "CausalHiFTGenerator"):
        raise ImportError(
            f"{module.__file__} has no CausalHiFTGenerator: name a checkout of FunAudioLLM/CosyVoice in {HOME}"
        )
    importlib.import_module(CONVOLUTION)


def use_checkout() -> None:
    """Put the checkout that COSYVOICE_HOME names in front of ``sys.path``; nothing where it names none.

    Raises ImportError where it is no checkout, or another ``cosyvoice`` is loaded.
    """
    named = os.environ.get(HOME)
    if not named:
        return
    home = Path(named).expanduser().resolve()
    if not (home / "cosyvoice" / "hifigan" / "generator.py").is_file():
        raise ImportError(f"{HOME}={named}: expected a checkout of FunAudioLLM/CosyVoice with cosyvoice/hifigan in it")
    loaded = getattr(sys.modules.get("cosyvoice"), "__path__", None)
    if loaded is not None and home / "cosyvoice" not in [Path(path).resolve() for path in loaded]:
        raise ImportError(f"cosyvoice is loaded from {next(iter(loaded))}, not from {HOME}={named}: set it before")
    for folder in (home / "third_party" / "Matcha-TTS", home):  # as upstream's README has it
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
