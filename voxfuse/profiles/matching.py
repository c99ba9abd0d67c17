"""Which fusion replaces a hotspot, and why none where none does.

Patterns stand beside each fusion (``Fusion.patterns``). A chain that runs as somebody's Triton kernel already is
deferred to it, unless that kernel is voxfuse's own: then the hotspot's fusion is the one that runs it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from voxfuse.fusions.registry import FUSIONS
from voxfuse.records import Fusion, FusionPattern, TensorSignature

BELOW_NOISE = "no fusion: below noise"
DEFERRED = "deferred: stack has its own"
UNMATCHED = "unmatched"
GRAPH = "no fusion: launch of a captured graph"
RUNS = "runs already"
_OWN_OP = "voxfuse::"
_NOT_THE_STACKS = ("aten::", "prims::", "c10d::", "profiler::", "inductor::", "torch::")
_TRITON = "triton:"


def matches(
    operations: tuple[str, ...],
    classes: tuple[str, ...],
    signature: tuple[TensorSignature, ...],
    stack: str,
    fusions: Iterable[Fusion] | None = None,
) -> tuple[str, ...]:
    """Names of the fusions of a stack (of all for "") that replace a part of a chain in a module of these classes."""
    candidates = FUSIONS.values() if fusions is None else fusions
    return tuple(
        fusion.name
        for fusion in candidates
        if (not stack or stack in fusion.stacks)
        and any(_fits(pattern, operations, classes, signature) for pattern in fusion.patterns)
    )


def own_kernels(operations: tuple[str, ...]) -> tuple[str, ...]:
    """The voxfuse kernels (files) that a chain runs."""
    names = {name if name.startswith(_OWN_OP) else _function(name) for name in operations}
    return tuple(kernel for kernel, own in _own_names().items() if own & names)


def running(operations: tuple[str, ...], stack: str) -> tuple[str, ...]:
    """The fusions of a stack that use those kernels."""
    kernels = set(own_kernels(operations))
    return tuple(
        fusion.name
        for fusion in FUSIONS.values()
        if (not stack or stack in fusion.stacks) and kernels & {*fusion.kernels}
    )


def foreign_kernels(operations: tuple[str, ...]) -> tuple[str, ...]:
    """Kernels of somebody else in a chain: Triton's (Inductor's count as such) and custom operations."""
    own = set().union(*_own_names().values())
    found = []
    for name in operations:
        if name.startswith((_TRITON, "kernel:triton_")):
            found.append(_function(name))
        elif "::" in name and not name.startswith(("kernel:", *_NOT_THE_STACKS)):
            found.append(name)
    return tuple(dict.fromkeys(name for name in found if name not in own))


def _fits(
    pattern: FusionPattern,
    operations: tuple[str, ...],
    classes: tuple[str, ...],
    signature: tuple[TensorSignature, ...],
) -> bool:
    wanted = pattern.operations
    if not wanted and not classes:
        return False
    if not any(operations[at : at + len(wanted)] == wanted for at in range(len(operations) - len(wanted) + 1)):
        return False
    if classes and not _in_order(pattern.modules, classes):
        return False
    if not signature:
        return True
    first = signature[0]
    return (not pattern.ranks or len(first.shape) in pattern.ranks) and (
        not pattern.dtypes or first.dtype in pattern.dtypes
    )


def _in_order(wanted: tuple[str, ...], found: tuple[str, ...]) -> bool:
    """Whether all of the one occur in the other, in its order."""
    rest = iter(found)
    return all(name in rest for name in wanted)


def _function(name: str) -> str:
    return name.partition(":")[2] if name.startswith((_TRITON, "kernel:")) else ""


@functools.cache
def _own_names() -> dict[str, frozenset[str]]:
    """Names of voxfuse's Triton functions and custom operations by kernel file, read from the sources.

    Importing the files instead would need Triton.
    """
    folder = Path(__file__).parents[1] / "kernels"
    found = {}
    for file in sorted(folder.glob("[a-z]*.py")):
        names = set()
        body = ast.parse(file.read_text(encoding="utf-8")).body
        constants = dict(filter(None, map(_constant, body)))
        for node in body:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("fused_op"):
                    name = decorator.args[0]
                    names.add(_OWN_OP + (constants[name.id] if isinstance(name, ast.Name) else ast.literal_eval(name)))
                elif "jit" in ast.unparse(decorator):
                    names.add(node.name)  # type: ignore[attr-defined]
        found[file.stem] = frozenset(names)
    return found


def _constant(node: ast.stmt) -> tuple[str, str] | None:
    """The name and value of a module's constant text, or None."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
            return name, text
    return None
