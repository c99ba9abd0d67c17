"""The annotations that voxfuse's own capture writes into a trace, and how annotations of others are read.

A mark is a range on a host thread: a request (one utterance), a stage of the stack, or a call of a module. Traces of
others have none of these: their outermost annotation then stands for the stage, inner ones and modules (frames named
``nn.Module: CLASS_NUMBER``, which torch.profiler writes with ``with_stack=True``) for the module path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

REQUEST, STAGE, MODULE = "voxfuse request: ", "voxfuse stage: ", "voxfuse module: "
_FRAME = "nn.Module: "
_TRANSPARENT = (  # ranges of torch itself, which say nothing about the model
    "ProfilerStep#",
    "Torch-Compiled Region",
    "## Call CompiledFxGraph",
    "TorchDynamo Cache Lookup",
    "Pregraph bytecode",
    "PyTorch Profiler",
    "Optimizer.",
    "autograd::engine",
)


class Context(NamedTuple):
    """Where in a model something ran. ``classes`` are those of the module and of what it is in, innermost last."""

    stage: str = ""
    module: str = ""
    classes: tuple[str, ...] = ()
    own: bool = False  # whether the stage was marked by voxfuse


def module_mark(path: str, classes: Iterable[str]) -> str:
    """The annotation of a call of the module at a path; ``classes`` of the modules that it lies in, its own last."""
    return f"{MODULE}{path}|{'/'.join(classes)}"


def enter(name: str, outer: Context) -> Context | None:
    """The context inside a mark, or None where the mark changes nothing."""
    if name.startswith(MODULE):
        path, _, found = name[len(MODULE) :].partition("|")
        *parents, kind = found.split("/")
        # a parent is missing outside where its parts are called, but not its own forward
        missing = (parent for parent in parents if parent not in outer.classes)
        return outer._replace(module=general(path), classes=(*outer.classes, *missing, kind))
    if name.startswith(STAGE):
        return outer._replace(stage=name[len(STAGE) :], own=True)
    if name.startswith(REQUEST):
        return None
    if name.startswith(_FRAME):
        kind = re.sub(r"_\d+$", "", name[len(_FRAME) :])
        return outer._replace(module=f"{outer.module}/{kind}".lstrip("/"), classes=(*outer.classes, kind))
    if outer.own or name.startswith(_TRANSPARENT):
        return None
    if not outer.stage:
        return outer._replace(stage=general(name))
    return outer._replace(module=f"{outer.module}/{general(name)}".lstrip("/"))


def general(name: str) -> str:
    """A path or annotation without its numbers and identifiers: equal layers, steps and requests belong together."""
    name = re.sub(r"(?<![A-Za-z0-9])(?=[0-9a-f-]*\d)[0-9a-f-]{8,}(?![A-Za-z0-9])", "*", name)
    return re.sub(r"(?<![A-Za-z])\d+", "*", name)
