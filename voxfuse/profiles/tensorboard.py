"""A log folder for TensorBoard's torch-tb-profiler (0.4.3, its last release; deprecated upstream: an export, no more).

The plugin knows launches as ``runtime`` only, not as ``cuda_runtime`` and ``cuda_driver``, and takes any file named
``WORKER.pt.trace.json.gz`` in a folder for a run.
"""

from __future__ import annotations

import gzip
import re
from pathlib import Path

_CATEGORY = re.compile(rb'("cat":\s*)"cuda_(?:runtime|driver)"')


def export(trace: Path, folder: Path) -> Path:
    """Write a trace into a log folder; returns the file. ``tensorboard --logdir FOLDER`` shows it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = trace.name.removesuffix(".gz").removesuffix(".json")
    target = folder / f"{name}.pt.trace.json.gz"
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rb") as source, gzip.open(target, "wb", compresslevel=6) as packed:
        for line in source:  # Kineto writes a field a line
            packed.write(_CATEGORY.sub(rb'\1"runtime"', line))
    return target
