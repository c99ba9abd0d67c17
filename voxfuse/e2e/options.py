"""Options that several commands share, checked before anything runs: a wrong one is a usage error, not a crash."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import typer


def checked_device(asked: str | None) -> str:
    """The device to use: the one asked for, or cuda where there is one.

    Raises typer.BadParameter for what is no device here.
    """
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", asked):
        raise typer.BadParameter(f"expected cpu, cuda or cuda:N, got {asked!r}", param_hint="--device")
    if asked.startswith("cuda"):
        if not torch.cuda.is_available():
            raise typer.BadParameter("torch sees no GPU: use --device cpu", param_hint="--device")
        index, count = int(asked.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= count:
            raise typer.BadParameter(f"{asked}: torch sees {count} GPUs, numbered from 0", param_hint="--device")
    return asked


def checked_folder(folder: Path, option: str) -> Path:
    """A folder that exists or can be made, and written. Raises typer.BadParameter where a file is in its place."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise typer.BadParameter(f"{existing} is a file: expected a folder, or a new name", param_hint=option)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{existing} is read-only: name another folder", param_hint=option)
    return folder


def refuse_ignored(context: typer.Context, reader: str, used: set[str]) -> None:
    """Raise typer.BadParameter that names the options given which ``reader`` would not use.

    ``used`` are parameter names of the command.
    """
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name is not None
        and parameter.name not in used
        and getattr(context.get_parameter_source(parameter.name), "name", "DEFAULT") != "DEFAULT"
    ]
    if given:
        raise typer.BadParameter(f"{reader} does not use {', '.join(given)}: leave {'them' if given[1:] else 'it'} out")
