"""The environment's say: VOXFUSE and VOXFUSE_FUSIONS, _STRICT, _BACKEND, _RECEIPTS, _CAPTURE."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast, get_args

from voxfuse.fusions.graph_runner import CapturePolicy
from voxfuse.fusions.registry import fusion
from voxfuse.records import Backend


class Switches(NamedTuple):
    """``off``: VOXFUSE=0. ``plus`` and ``minus`` are fusion names. ``receipts`` is a folder. ``capture`` says when CUDA
    graphs are captured (``fusions.graph_runner``)."""

    off: bool
    plus: frozenset[str]
    minus: frozenset[str]
    strict: bool
    backend: Backend | None
    receipts: Path | None
    capture: CapturePolicy


def read(environment: Mapping[str, str] | None = None) -> Switches:
    """Read the switches. Raises ValueError, naming the variable, where one has a value that it cannot have.

    VOXFUSE=0 wins over all others: nothing else is read but where receipts go, so no other variable can be wrong.
    """
    environment = os.environ if environment is None else environment
    receipts = environment.get("VOXFUSE_RECEIPTS") or None
    if _flag(environment, "VOXFUSE") is False:
        folder = None if receipts is None else Path(receipts)
        return Switches(True, frozenset(), frozenset(), strict=False, backend=None, receipts=folder, capture="warmup")
    plus, minus = _fusions(environment.get("VOXFUSE_FUSIONS", ""))
    named = environment.get("VOXFUSE_BACKEND") or None
    capture = environment.get("VOXFUSE_CAPTURE") or "warmup"
    if capture not in get_args(CapturePolicy):
        raise ValueError(f"VOXFUSE_CAPTURE: expected one of {', '.join(get_args(CapturePolicy))}, got {capture!r}")
    return Switches(
        off=False,
        plus=plus,
        minus=minus,
        strict=_flag(environment, "VOXFUSE_STRICT") is True,
        backend=None if named is None else backend(named, "VOXFUSE_BACKEND"),
        receipts=None if receipts is None else Path(receipts),
        capture=cast(CapturePolicy, capture),
    )


def backend(name: str, source: str = "backend") -> Backend:
    """Check the name of a backend. Raises ValueError that lists the known ones."""
    if name not in get_args(Backend):
        raise ValueError(f"{source}: expected one of {', '.join(get_args(Backend))}, got {name!r}")
    return cast(Backend, name)


def toolchain_missing() -> str | None:
    """Why Triton could not build its launchers here (it compiles a C stub that includes Python.h), or None."""
    named = os.environ.get("CC")
    if named is not None:
        command = named.split()[0] if named.split() else named
        if shutil.which(command) is None:
            return f"no C compiler: CC is {named!r}, which is not found; Triton needs one"
    elif not any(shutil.which(command) for command in ("gcc", "clang")):
        return "no C compiler: Triton needs gcc or clang on PATH, or CC set (Debian, Ubuntu: apt-get install gcc)"
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # as Triton does, for Debian's own Python
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if not header.is_file():
        return f"no {header}: Triton needs Python's headers (Debian, Ubuntu: apt-get install python3-dev)"
    return None


def _flag(environment: Mapping[str, str], name: str) -> bool | None:
    value = environment.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return None if value == "" else value == "1"


def _fusions(value: str) -> tuple[frozenset[str], frozenset[str]]:
    signed: dict[str, set[str]] = {"+": set(), "-": set()}
    for item in filter(None, (part.strip() for part in value.split(","))):
        if item[0] not in signed:
            raise ValueError(f"VOXFUSE_FUSIONS: expected +name or -name, separated by commas, got {item!r}")
        try:
            signed[item[0]].add(fusion(item[1:]).name)
        except KeyError as error:
            raise ValueError(f"VOXFUSE_FUSIONS: {error.args[0]}") from error
    if both := signed["+"] & signed["-"]:
        raise ValueError(f"VOXFUSE_FUSIONS: {', '.join(sorted(both))} both on and off")
    return frozenset(signed["+"]), frozenset(signed["-"])
