"""What the doctor finds on disk: caches that can be written and that nobody else can plant code in, free space, and
the ``.pth`` file that carries voxfuse into the processes that a server spawns."""

from __future__ import annotations

import os
import shutil
import site
import stat
from pathlib import Path

import torch

from voxfuse.doctor.findings import Finding, State
from voxfuse.e2e.weights.cache import cache_folder

ENOUGH_BYTES, FEWEST_BYTES = 2 << 30, 64 << 20  # free; below the first a note, below the second a problem
ROOT_USER = 0


def caches() -> list[Finding]:
    """Where Triton keeps compiled kernels and voxfuse converted weights: writable, and safe from other users."""
    hurts: State = "problem" if torch.cuda.is_available() else "note"  # Triton's cache is code, and runs on a GPU
    return [_cache("Triton cache", triton_cache(), hurts), _cache("voxfuse cache", cache_folder(), "note")]


def triton_cache() -> Path:
    """The folder that Triton chooses."""
    home = os.environ.get("TRITON_HOME")
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return Path(chosen) if chosen else Path(home or Path.home()) / ".triton" / "cache"


def _cache(subject: str, folder: Path, hurts: State) -> Finding:
    existing = _existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        advice = "cannot be written: what it would keep is made anew in every process"
        return Finding(subject=subject, value=str(folder), state="note", advice=advice)
    risk = shared_unsafely(folder)
    if risk is None:
        return Finding(subject=subject, value=str(folder))
    variable = "TRITON_CACHE_DIR" if subject.startswith("Triton") else "VOXFUSE_CACHE"
    advice = f"{risk}: they decide what this process loads from it. Point {variable} to a folder of your own (mode 700)"
    return Finding(subject=subject, value=str(folder), state=hurts, advice=advice)


def shared_unsafely(folder: Path) -> str | None:
    """Who else can put files into a folder, or replace it; None where nobody but its owner (and root) can.

    A folder that does not exist yet is judged by where it would be made: in a sticky folder for everybody (/tmp) others
    may make it first.
    """
    resolved = folder.resolve()
    existing = _existing(resolved)
    status = existing.stat()
    if status.st_uid not in (os.getuid(), ROOT_USER):
        return f"{existing} belongs to another user (uid {status.st_uid})"
    if status.st_mode & stat.S_IWOTH and (existing == resolved or not status.st_mode & stat.S_ISVTX):
        return f"every user may write into {existing}"
    if status.st_mode & stat.S_IWOTH:
        return f"every user may make {resolved} in {existing} before this one does"
    for parent in existing.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user may replace what lies in {parent}"
    return None


def disk() -> Finding:
    """Free space where the caches lie and where runs are written."""
    places = {"Triton cache": triton_cache(), "voxfuse cache": cache_folder(), "runs": Path.cwd()}
    by_device: dict[int, tuple[list[str], int]] = {}
    for name, folder in places.items():
        existing = _existing(folder)
        names, _ = by_device.setdefault(existing.stat().st_dev, ([], shutil.disk_usage(existing).free))
        names.append(name)
    value = "; ".join(f"{free / 2**30:.1f} GiB free for {', '.join(names)}" for names, free in by_device.values())
    least = min(free for _, free in by_device.values())
    if least >= ENOUGH_BYTES:
        return Finding(subject="disk", value=value)
    advice = f"compiled kernels, converted weights and gate runs want {ENOUGH_BYTES >> 30} GiB: make room"
    return Finding(subject="disk", value=value, state="problem" if least < FEWEST_BYTES else "note", advice=advice)


def pth_file() -> Finding:
    """Whether a ``.pth`` file of voxfuse is installed, without which VOXFUSE=1 reaches no process."""
    folders = [Path(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())]
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("voxfuse*.pth"))]
    if found:
        return Finding(subject=".pth file", value=", ".join(map(str, found)))
    wanted = os.environ.get("VOXFUSE") == "1"
    advice = "processes that a server spawns are not patched by VOXFUSE=1: call voxfuse.apply_patches() in each"
    return Finding(subject=".pth file", value="none", state="problem" if wanted else "note", advice=advice)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
