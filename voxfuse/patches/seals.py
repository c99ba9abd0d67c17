"""Modules whose code is compiled or captured already, so that a patch would not reach what runs."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

COMPILED = "already compiled: apply voxfuse before torch.compile, or revert and compile again"
WRAPPERS = {"compile_wrapper", "_fn", "new_fwd", "functionalized"}  # what torch names the functions it returns
CAPTURED = "captured in a CUDA graph: apply voxfuse before the capture"


class Seals:
    """The compiled and captured modules alive when it was made; what nobody holds any more does not count."""

    def __init__(self) -> None:
        self._roots = list(_live())
        if self._roots:
            self._roots.clear()
            gc.collect()
            self._roots = list(_live())

    def within(self, model: nn.Module) -> dict[int, str]:
        """Reasons by ``id`` of the modules of a model that run compiled or captured code.

        A module is sealed with everything in it; parts of something compiled from outside the model count too.
        """
        inside = {id(module) for module in model.modules()}
        own = [(module, reason) for module in model.modules() if (reason := seal(module)) is not None]
        return {
            id(part): reason for root, reason in (*self._roots, *own) for part in root.modules() if id(part) in inside
        }

    def of_class(self, owner: type) -> str | None:
        """Why a class must not be patched: an instance of it runs compiled or captured code; None if none does."""
        for root, reason in self._roots:
            if any(isinstance(part, owner) for part in root.modules()):
                return reason
        return None


def seal(module: nn.Module) -> str | None:
    """Why this module itself runs compiled or captured code, or None."""
    attributes = vars(module)
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if attributes.get("_compiled_call_impl") is not None or is_compiled(attributes.get("forward")):
        return COMPILED
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return COMPILED
    if "forward" in attributes and origin(attributes["forward"]) == "torch.cuda.graphs":
        return CAPTURED
    return None


def is_compiled(function: Any) -> bool:
    """Whether a callable came from ``torch.compile``."""
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def origin(value: Any) -> str:
    """The module in which a callable's code was written: by its globals, which ``functools.wraps`` does not copy."""
    while isinstance(value, functools.partial | MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", value.__code__.co_filename))
    return type(value).__module__


def _live() -> Iterator[tuple[nn.Module, str]]:
    """Every live module that is compiled or captured, or that a compiled or captured function reaches.

    Found by what refers to torch's own wrappers, in C: ``gc.get_objects`` would hold half-built objects of other
    threads, which then fail.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    graphs = sys.modules.get("torch.cuda.graphs")
    wrappers: list[Any] = [dynamo.OptimizedModule] if dynamo is not None else []
    wrappers += [code for module in (dynamo, graphs) if module is not None for code in _inner_functions(module)]
    things: list[Any] = gc.get_referrers(*wrappers) if wrappers else []
    for thing in things:
        is_function = type(thing) is FunctionType
        if isinstance(thing, nn.Module):
            reason = seal(thing)
            if reason is not None:
                yield thing, reason
        elif is_function and is_compiled(thing):
            for module in _reached(thing._torchdynamo_orig_callable):
                yield module, COMPILED
        elif is_function and origin(thing) == "torch.cuda.graphs":
            for module in _reached(thing):
                reason = seal(module)
                if reason is not None:
                    yield module, reason


def _inner_functions(module: ModuleType) -> Iterator[CodeType]:
    """The code of functions that a module's functions and methods make: the wrappers are among them."""
    functions = [value for value in vars(module).values() if isinstance(value, FunctionType)]
    for kind in [value for value in vars(module).values() if isinstance(value, type)]:
        functions += [value for value in vars(kind).values() if isinstance(value, FunctionType)]
    inner = [const for function in functions for const in function.__code__.co_consts if isinstance(const, CodeType)]
    while inner:
        code = inner.pop()
        if code.co_name in WRAPPERS:
            yield code
        inner += [const for const in code.co_consts if isinstance(const, CodeType)]


def _reached(function: Any) -> Iterator[nn.Module]:
    """The modules that a callable is bound to, closes over or names as globals."""
    values: list[Any] = [function]
    if isinstance(function, MethodType):
        values.append(function.__self__)
        function = function.__func__
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
        values.extend(function.__globals__.get(name) for name in function.__code__.co_names)
    yield from (value for value in values if isinstance(value, nn.Module))
