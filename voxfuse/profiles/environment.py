"""Where a measurement was taken: GPU, driver, versions and commit, for every verdict."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from voxfuse._version import VERSION
from voxfuse.kernels._triton import TRITON_VERSION
from voxfuse.profiles.nvml import current_gpu, driver_version
from voxfuse.records import Environment

COMMIT_VARIABLE = "VOXFUSE_COMMIT"


def capture_environment(packages: Iterable[str] = ()) -> Environment:
    """The environment of this process; ``packages`` are distributions whose versions matter, absent ones left out.

    GPU fields are None where torch sees no GPU. ``commit`` is that of the source checkout which voxfuse is imported
    from, with ``-dirty`` where files differ from it, and None outside a checkout; the variable VOXFUSE_COMMIT stands
    for it where the code was copied without its ``.git``.
    """
    gpu = uuid = capability = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu, capability = properties.name, f"{properties.major}.{properties.minor}"
        uuid = None if (name := current_gpu()) is None else hashlib.sha256(name.encode()).hexdigest()
    versions = {name: found for name in packages if (found := version_of(name)) is not None}
    return Environment(
        gpu=gpu,
        gpu_uuid_sha256=uuid,
        compute_capability=capability,
        driver=driver_version(),
        torch=str(torch.__version__),
        triton=TRITON_VERSION,
        python=platform.python_version(),
        platform=platform.platform(),
        voxfuse=VERSION,
        commit=os.environ.get(COMMIT_VARIABLE) or _commit(),
        packages=versions,
    )


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changed else head
