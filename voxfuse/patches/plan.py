"""The decisions of ``apply_patches``: for every patch on every target, apply it or say why not. Changes nothing."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from voxfuse._version import VERSION
from voxfuse.kernels._op import backend_unavailable
from voxfuse.kernels._triton import TRITON_VERSION
from voxfuse.patches import registry, switches
from voxfuse.patches.guards import check_sources, installed_version, resolve, shadowed_by
from voxfuse.patches.layers import Owner, existing_site, untouched
from voxfuse.patches.policy import Selection
from voxfuse.patches.receipts import Entry, Why
from voxfuse.patches.seals import Seals, origin
from voxfuse.patches.spec import Patch, StackPatches
from voxfuse.records import Backend

WHOLE_STACK = "*"  # the fusion of a receipt that speaks for a whole stack

Problems = list[tuple[Why, str]]


@dataclass
class Step:
    """One patch on one target: its entry and, where it is to be applied, the owners of the attribute to replace."""

    entry: Entry
    patch: Patch | None = None
    owners: list[Owner] = field(default_factory=list)
    unproven: bool = False


class Planner:
    """Plans the targets of one call: one scan for compiled modules, one look at the backend."""

    def __init__(self, wishes: Selection, backend: Backend, off: bool) -> None:
        self._wishes = wishes
        self._backend = backend
        self._obstacle = _obstacle(backend, off)

    @functools.cached_property
    def _seals(self) -> Seals:
        return Seals()

    def stack(self, name: str, explicit: bool) -> list[Step]:
        """Plan a stack by name: its classes and functions. Imports it. ``explicit``: the caller named it."""
        stack = registry.patches_of(name)
        if stack is None:
            reason = "no patches for this stack in this version"
            return [Step(Entry(WHOLE_STACK, name, name, "skipped", Why.FAILED, reason, explicit=explicit))]
        scope = _Scope(stack, explicit)
        problem = self._obstacle
        if problem is None:
            try:
                stack.load()
            except Exception as error:  # whatever a broken installation raises, the other stacks must go on
                problem = (Why.FAILED if explicit else Why.ABSENT), _not_importable(stack, error)
        if problem is not None:
            return [scope.skip(patch, *problem) for patch in stack.patches]
        return [self._patch(scope, patch, self._class_owner) for patch in stack.patches]

    def model(self, model: nn.Module) -> list[Step]:
        """Plan one model: the modules in it that are instances of a supported stack's classes.

        Where two stacks have a class in common, one that fits is enough: the other's failure is no receipt.
        """
        steps: list[Step] = []
        for name in registry.STACKS:
            stack = registry.patches_of(name)
            if stack is None or not any(_matching(model, patch) for patch in stack.patches):
                continue
            scope = _Scope(stack, explicit=True)
            if self._obstacle is not None:
                steps += [scope.skip(patch, *self._obstacle) for patch in stack.patches]
                continue
            owners = functools.partial(_instance_owners, model, self._seals.within(model))
            for patch in stack.patches:
                if patch.by_name_only is not None:
                    steps.append(scope.skip(patch, Why.ABSENT, f"patch the stack by name: {patch.by_name_only}"))
                elif _matching(model, patch) or _method_is_gone(patch):
                    steps.append(self._patch(scope, patch, owners))
                else:  # whatever became of a class that this model has no instance of: a relative stack's, say
                    steps.append(scope.skip(patch, Why.ABSENT, _nothing_in_model(patch)))
        served = {step.entry.target for step in steps if step.entry.why is Why.APPLIED}
        steps = [step for step in steps if step.entry.why is not Why.FAILED or step.entry.target not in served]
        if not steps:
            kind = type(model)
            where, reason = f"{kind.__module__}.{kind.__qualname__}", "no module of a supported stack in this model"
            steps.append(Step(Entry(WHOLE_STACK, "unknown", where, "skipped", Why.FAILED, reason)))
        return steps

    def _patch(self, scope: _Scope, patch: Patch, find: Callable[[Patch], tuple[list[Owner], Problems]]) -> Step:
        choice = self._wishes.choose(patch.fusion, scope.stack.name, scope.version)
        if not choice.wanted:
            step = scope.skip(patch, Why.CHOSEN, str(choice.reason))
            step.unproven = choice.unproven
            return step
        if self._backend not in patch.backends:
            reason = f"runs with backend {' or '.join(patch.backends)}, not {self._backend}"
            return scope.skip(patch, Why.CHOSEN, reason)
        if (served := scope.served.get(patch.target)) is not None:
            return scope.skip(patch, Why.CHOSEN, f"fusion {served} serves this target")
        if (absent := _absent_module(patch, scope.explicit)) is not None:
            return scope.skip(patch, Why.ABSENT, absent)
        sources = check_sources(scope.stack, patch, scope.version)
        if sources.problem is not None:
            return scope.skip(patch, Why.FAILED, sources.problem)
        owners, problems = find(patch)
        if not owners:
            why, reason = problems[0] if problems else (Why.ABSENT, _nothing_in_model(patch))
            return scope.skip(patch, why, reason)
        remarks = [remark for remark in (choice.reason, sources.remark) if remark is not None]
        if problems:
            remarks.append(f"{len(problems)} of {len(owners) + len(problems)} modules skipped: {problems[0][1]}")
        entry = scope.entry(patch, Why.APPLIED, "; ".join(remarks) or None)
        entry.status, entry.count = "applied", len(owners)
        scope.served[patch.target] = patch.fusion.name
        return Step(entry, patch, owners)

    def _class_owner(self, patch: Patch) -> tuple[list[Owner], Problems]:
        upstream = resolve(patch.target)
        reason = _occupied(upstream.owner, upstream.name, patch)
        for path in patch.absorbs:
            owner = resolve(path).owner
            if reason is None and isinstance(owner, type):
                reason = self._seals.of_class(owner)
        return ([upstream.owner], []) if reason is None else ([], [(Why.FAILED, reason)])


class _Scope:
    """A stack as it is installed, and entries for it."""

    def __init__(self, stack: StackPatches, explicit: bool) -> None:
        self.stack = stack
        self.explicit = explicit
        self.served: dict[str, str] = {}  # the fusion that was planned for a target
        installed = installed_version(stack.distribution)
        self.version = installed or "unknown"
        versions = {"voxfuse": VERSION, "torch": torch.__version__, "triton": TRITON_VERSION}
        versions[stack.distribution] = installed
        self._versions = {name: version for name, version in versions.items() if version is not None}

    def entry(self, patch: Patch, why: Why, reason: str | None) -> Entry:
        name, target = patch.fusion.name, patch.target
        return Entry(
            name, self.stack.name, target, "skipped", why, reason, versions=self._versions, explicit=self.explicit
        )

    def skip(self, patch: Patch, why: Why, reason: str) -> Step:
        return Step(self.entry(patch, why, reason))


def method_name(patch: Patch) -> str:
    """The attribute that a patch replaces."""
    return patch.target.partition(":")[2].rpartition(".")[2]


def _obstacle(backend: Backend, off: bool) -> tuple[Why, str] | None:
    if off:
        return Why.CHOSEN, "VOXFUSE=0"
    reason = backend_unavailable(backend)
    if reason is None and backend == "triton":
        reason = switches.toolchain_missing()
    return None if reason is None else (Why.FAILED, reason)


def _not_importable(stack: StackPatches, error: Exception) -> str:
    if isinstance(error, ImportError) and installed_version(stack.distribution) is None:
        return f"{stack.distribution} is not installed"
    return f"{stack.distribution} cannot be imported: {type(error).__name__}: {error}"


def _absent_module(patch: Patch, explicit: bool) -> str | None:
    """Why a module that the stack's ``load`` left out is not there, or None. It is imported where the stack was named.

    (A heavy part of a stack need not be loaded into a process that does not use it.)
    """
    for module in dict.fromkeys(path.partition(":")[0] for path in patch.absorbs):
        if module in sys.modules:
            continue
        if not explicit:
            return f"{module} is not imported: import it before, or name the stack"
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a broken installation raises, the other patches must go on
            return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def _instance_owners(model: nn.Module, sealed: dict[int, str], patch: Patch) -> tuple[list[Owner], Problems]:
    owners: list[Owner] = []
    problems: Problems = []
    for module in _matching(model, patch):
        reason = sealed.get(id(module)) or _instance_problem(module, patch)
        if reason is None:
            owners.append(module)
        else:
            problems.append((Why.FAILED, reason))
    return owners, problems


def _instance_problem(module: nn.Module, patch: Patch) -> str | None:
    """Why one module must be left alone: it, or a part of it whose behaviour the patch absorbs, is not upstream's."""
    for path in patch.absorbs:
        upstream = resolve(path)
        if isinstance(upstream.owner, ModuleType):
            continue
        for part in module.modules() if path != patch.target else (module,):
            if not isinstance(part, upstream.owner):
                continue
            home, function = untouched(type(part), upstream.name)
            if function is not upstream.function:
                return f"{upstream.owner.__name__}.{upstream.name} is overridden by {home.__module__}.{home.__name__}"
            if (reason := shadowed_by(part, upstream.name)) is not None:
                return reason
    return _occupied(module, method_name(patch), patch)


def _occupied(owner: Owner, name: str, patch: Patch) -> str | None:
    held = existing_site(owner, name)
    top = held.top if held is not None else None
    if held is None or top is None:
        return None
    if (intruder := held.intruder()) is not None:
        return f"already patched by {origin(intruder)}"
    return f"already replaced by fusion {top.fusion}" if top.fusion != patch.fusion.name else None


def _matching(model: nn.Module, patch: Patch) -> list[nn.Module]:
    try:
        owner = resolve(patch.target).owner
    except LookupError:  # not loaded, so no instance of it exists; or renamed upstream, which a stack name reports
        return []
    if not isinstance(owner, type):
        return []
    return [m for m in model.modules() if isinstance(m, owner) and not _of_a_relative(type(m), owner, patch)]


def _method_is_gone(patch: Patch) -> bool:
    """Whether the class of a patch is there without its method: upstream changed, in whichever models have it."""
    module, _, path = patch.target.partition(":")
    owner: Any = sys.modules.get(module)
    for part in path.split(".")[:-1]:
        owner = vars(owner).get(part) if owner is not None else None
    return isinstance(owner, type) and not hasattr(owner, method_name(patch))


def _of_a_relative(kind: type, owner: type, patch: Patch) -> bool:
    """Whether upstream itself, in the same module, wrote another method for a subclass: that is another target."""
    home: Any = untouched(kind, method_name(patch))[0]
    return home.__module__ == owner.__module__ and not issubclass(owner, home)


def _nothing_in_model(patch: Patch) -> str:
    *classes, name = patch.target.partition(":")[2].split(".")
    return f"no {'.'.join(classes)} in this model" if classes else f"{name} is a function: patch the stack by name"
