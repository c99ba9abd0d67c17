"""Why a target must be left alone: its source is not a tested one, or somebody else has replaced it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from voxfuse.patches.layers import MISSING, shadow, untouched
from voxfuse.patches.seals import CAPTURED, COMPILED, is_compiled, origin
from voxfuse.patches.spec import Patch, StackPatches

# torch.no_grad(), torch.inference_mode() and transformers' deprecate_kwarg, capture_outputs, check_model_inputs and the
# like as decorators: part of how upstream wrote a function, not a replacement.
_TRANSPARENT_DECORATORS = (
    "torch.utils._contextlib",
    "transformers.utils.deprecation",
    "transformers.utils.generic",
    "transformers.utils.output_capturing",
    "transformers.modeling_layers",
    "transformers.modeling_rope_utils",
)


class Upstream(NamedTuple):
    """An upstream callable: ``owner`` is the class or module named, ``home`` the one that defines it."""

    owner: type | ModuleType
    name: str
    home: type | ModuleType
    function: Any


def resolve(path: str) -> Upstream:
    """Find ``package.module:Class.method`` or ``package.module:function`` as upstream wrote it.

    The module must be loaded. Raises LookupError where the module, class or attribute is not there, ValueError where
    the class is torch's own.
    """
    module_name, _, attributes = path.partition(":")
    *classes, name = attributes.split(".")
    owner: Any = sys.modules.get(module_name)
    if owner is None:
        raise LookupError(f"{module_name} is not loaded")
    for part in classes:
        owner = vars(owner).get(part)
        if not isinstance(owner, type):
            raise LookupError(f"{path}: no class {part}")
    if owner.__name__.startswith("torch.") or getattr(owner, "__module__", "").partition(".")[0] == "torch":
        raise ValueError(f"{path} is torch's {owner.__name__}: torch is never patched")
    try:
        home, function = untouched(owner, name)
    except AttributeError as error:
        raise LookupError(f"{path}: no {name}") from error
    return Upstream(owner, name, home, function)


def source_sha256(function: Callable[..., Any]) -> str:
    """SHA-256 of the source text of a function, dedented, decorators included.

    The text is found by the code object's own file and line: ``functools.wraps`` cannot point it elsewhere. Raises
    TypeError where the object has no Python code, OSError where its source is not on disk.
    """
    code = getattr(_written(function), "__code__", None)
    if code is None:
        raise TypeError(f"expected a Python function, got {type(function).__name__}")
    return hashlib.sha256(textwrap.dedent(inspect.getsource(code)).encode()).hexdigest()


def installed_version(distribution: str) -> str | None:
    """The installed release of a distribution, or None where it has no metadata."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class Sources(NamedTuple):
    """``problem``: why the upstream sources forbid the patch. ``remark``: what to say of an untested release."""

    problem: str | None = None
    remark: str | None = None


def check_sources(stack: StackPatches, patch: Patch, version: str) -> Sources:
    """Compare every absorbed upstream callable with the tested sources, and find out who defined it."""
    tested = ", ".join(stack.sources) or "none"
    hashes: dict[str, str] = {}
    for path in patch.absorbs:
        try:
            upstream = resolve(path)
        except LookupError as error:
            return Sources(f"upstream changed: {error.args[0]} (tested: {tested})")
        who = replaced_by(upstream)
        if who is not None:
            return Sources(who)
        try:
            hashes[path] = source_sha256(upstream.function)
        except (OSError, TypeError) as error:
            return Sources(f"the source of {path} cannot be read: {error}")
    if version in stack.sources:
        expected = stack.sources[version]
        changed = [path for path in patch.absorbs if hashes[path] != expected[path]]
        return Sources(f"upstream changed: {', '.join(changed)} (tested: {tested})" if changed else None)
    for known, expected in stack.sources.items():
        if all(hashes[path] == expected[path] for path in patch.absorbs):
            return Sources(remark=f"untested version {version}, sources identical to {known}")
    nearest = next(reversed(stack.sources.values()), {})
    changed = [path for path in patch.absorbs if hashes[path] != nearest.get(path)]
    return Sources(f"upstream changed: {', '.join(changed)} (version {version}; tested: {tested})")


def replaced_by(upstream: Upstream) -> str | None:
    """Who replaced a class's or module's function, as a reason; None where it is the one that its module wrote."""
    module = upstream.home if isinstance(upstream.home, ModuleType) else sys.modules.get(upstream.home.__module__)
    function = _written(upstream.function)
    if is_compiled(upstream.function):
        return COMPILED
    if not isinstance(function, FunctionType) or module is None or function.__globals__ is not vars(module):
        return f"already patched by {origin(function or upstream.function)}"
    if not _same_file(function.__code__.co_filename, getattr(module, "__file__", None)):
        return f"already patched by {_module_of_file(function.__code__.co_filename)}"
    return None


def shadowed_by(module: nn.Module, name: str) -> str | None:
    """Who put something in an instance's ``__dict__`` in place of its method, as a reason, or None."""
    value = shadow(module, name)
    if value is MISSING:
        return None
    if is_compiled(value):
        return COMPILED
    who = origin(value)
    return CAPTURED if who == "torch.cuda.graphs" else f"already patched by {who}"


def _written(function: Any) -> Any:
    """The function that upstream wrote, below decorators that are part of its definition."""
    while isinstance(function, FunctionType) and function.__globals__.get("__name__") in _TRANSPARENT_DECORATORS:
        function = getattr(function, "__wrapped__", None)
    return function


def _same_file(code_file: str, module_file: str | None) -> bool:
    if module_file is None or module_file.endswith(".pyc"):  # nothing to compare with; the globals are checked already
        return True
    return os.path.realpath(code_file) == os.path.realpath(module_file)


def _module_of_file(path: str) -> str:
    real = os.path.realpath(path)
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if issubclass(type(module), ModuleType) else None
        if isinstance(file, str) and os.path.realpath(file) == real:
            return name
    return path
