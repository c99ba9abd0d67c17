"""Import ``kokoro.model`` and its modules, also where the text front end that ``import kokoro`` pulls is absent.

``kokoro/__init__.py`` imports ``kokoro.pipeline``, which needs misaki and spaCy. The model needs neither.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

# What kokoro/__init__.py (0.9.4) re-exports, without the text front end.
_EXPORTS = {
    "model": ("KModel",),
    "istftnet": ("Decoder",),
    "modules": ("CustomAlbert", "ProsodyPredictor", "TextEncoder"),
}
_lock = threading.Lock()


def load_kokoro() -> None:
    """Make ``kokoro.model``, ``kokoro.istftnet`` and ``kokoro.modules`` importable and import them.

    A kokoro that is imported already is left as it is. With misaki installed this is the ordinary ``import kokoro``;
    without it (or without what misaki needs) a package of the same name and folder is registered, which offers the
    same names, except that using ``kokoro.KPipeline`` raises the ImportError that ``import kokoro`` would have raised.

    Raises ImportError where kokoro, or something that its model needs, is not installed.
    """
    with _lock:
        if "kokoro" not in sys.modules:
            _import_package()
        for module in _EXPORTS:
            importlib.import_module(f"kokoro.{module}")


def _import_package() -> None:
    spec = importlib.util.find_spec("kokoro")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("kokoro is not installed: pip install --no-deps kokoro==0.9.4", name="kokoro")
    if importlib.util.find_spec("misaki") is not None:
        try:
            importlib.import_module("kokoro")
            return
        except ImportError as error:
            if (error.name or "").partition(".")[0] == "kokoro":
                raise
    package = importlib.util.module_from_spec(spec)
    sys.modules["kokoro"] = package
    try:
        _fill(package)
    except BaseException:
        del sys.modules["kokoro"]
        raise


def _fill(package: ModuleType) -> None:
    """Give the bare package what kokoro/__init__.py would have given it."""
    from loguru import logger

    logger.disable("kokoro")  # as upstream: its debug lines print every phoneme string

    def missing(name: str) -> Any:
        if name == "KPipeline":
            return importlib.import_module("kokoro.pipeline").KPipeline
        raise AttributeError(f"module 'kokoro' has no attribute {name!r}")

    package.__dict__["__getattr__"] = missing
    package.__dict__["__version__"] = importlib.metadata.version("kokoro")
    for name, exports in _EXPORTS.items():
        module = importlib.import_module(f"kokoro.{name}")
        setattr(package, name, module)
        for export in exports:
            setattr(package, export, getattr(module, export))
