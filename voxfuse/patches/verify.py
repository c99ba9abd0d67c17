"""Untouched against patched: per method against a float64 oracle on forced inputs, and for the whole model."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from voxfuse.patches.layers import MISSING, ClassSite, InstanceSite, Replacement, Site, shadow, untouched
from voxfuse.patches.receipts import Entry


@dataclasses.dataclass(frozen=True)
class MethodError:
    """One patched method of one module: relative RMS errors against float64, the worst of its calls.

    None where there is no oracle; ``note`` says why.
    """

    module: str
    method: str
    fusion: str
    calls: int
    untouched: float | None
    patched: float | None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Verification:
    """``model_error``: relative RMS difference of the whole model's outputs, patched against untouched.

    Infinite where the shapes differ, None where there is no floating-point output. It may be large through phase or a
    rounded duration alone; ``methods`` say whether the patches are to blame.
    """

    model_error: float | None
    methods: tuple[MethodError, ...]

    def __str__(self) -> str:
        lines = [f"whole model, patched against untouched: {_figure(self.model_error)} relative RMS"]
        lines += [
            f"{method.module or '(model)'}.{method.method} [{method.fusion}], {method.calls} calls: against float64, "
            f"untouched {_figure(method.untouched)}, patched {_figure(method.patched)}"
            + (f" ({method.note})" if method.note else "")
            for method in self.methods
        ]
        return "\n".join(lines)


class _Probe:
    """Stands in for a method during the untouched run and measures every call on the inputs that it got."""

    def __init__(self, path: str, module: nn.Module, name: str, fusion: str, patched: Callable[..., Any]) -> None:
        self.path, self.module, self.name, self.fusion = path, module, name, fusion
        self._untouched = untouched(type(module), name)[1]
        self._patched = patched
        self._calls = 0
        self._errors: list[tuple[float | None, float | None]] = []
        self._note: str | None = None

    def bound(self) -> MethodType:
        def probe(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not self.module:  # a copy made for the measurement of this or an enclosing method
                return self._untouched(module, *args, **kwargs)
            return self._measure(args, kwargs)

        return MethodType(probe, self.module)

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._calls += 1
        # Both on copies and before the untouched call: state (caches) and inputs changed in place stay as they should.
        with _forked_rng():
            patched = self._patched(_copy(self.module), *_clone(args), **_clone(kwargs))
        oracle = self._oracle(args, kwargs)
        before = _rng()
        result = self._untouched(self.module, *args, **kwargs)
        if not all(map(torch.equal, before, _rng())):
            self._note = "draws random numbers, which differ in float64"
        elif oracle is not None:
            self._errors.append((relative_rms(result, oracle), relative_rms(patched, oracle)))
        return result

    def _oracle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with _forked_rng():
                return self._untouched(_doubled(_copy(self.module)), *_to_double(args), **_to_double(kwargs))
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
        ) as error:  # upstream insists on a dtype, or has no float64
            self._note = f"no float64 oracle: {error}"
            return None

    def error(self) -> MethodError:
        return MethodError(
            module=self.path,
            method=self.name,
            fusion=self.fusion,
            calls=self._calls,
            untouched=_worst(untouched for untouched, _ in self._errors),
            patched=_worst(patched for _, patched in self._errors),
            note=self._note if self._calls else "never called",
        )


def verify(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    targets: Sequence[tuple[Entry, Site, Replacement]],
    paused: Callable[[], AbstractContextManager[None]],
) -> Verification:
    """Compare untouched and patched runs of ``model(*args, **kwargs)``: see ``PatchSet.verify``."""
    probes = [
        _Probe(path, module, site.name, entry.fusion, replacement.function)
        for entry, site, replacement in targets
        for path, module in _modules(model, site)
    ]
    with torch.no_grad():
        with paused(), _forked_rng(), _installed(probes):
            plain = _clone(model(*_clone(args), **_clone(kwargs)))
        with _forked_rng():
            fused = model(*_clone(args), **_clone(kwargs))
    return Verification(relative_rms(fused, plain), tuple(probe.error() for probe in probes))


def relative_rms(value: Any, reference: Any) -> float | None:
    """‖value − reference‖₂ / ‖reference‖₂ over all floating-point tensors in two results; see ``Verification``."""
    pairs = list(zip(_tensors(value), wanted := _tensors(reference), strict=False))
    if not wanted:
        return None
    if len(_tensors(value)) != len(wanted) or any(one.shape != other.shape for one, other in pairs):
        return math.inf
    difference = math.fsum(float((_wide(one) - _wide(other)).abs().square().sum()) for one, other in pairs)
    norm = math.fsum(float(_wide(other).abs().square().sum()) for other in wanted)
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / norm)


def _modules(model: nn.Module, site: Site) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model on which a class or instance site acts. Functions belong to no module."""
    for path, module in model.named_modules():
        if isinstance(site, InstanceSite):
            acts = module is site.owner
        else:
            acts = isinstance(site, ClassSite) and isinstance(module, site.owner) and _inherits(module, site)
        if acts:
            yield path, module


def _inherits(module: nn.Module, site: ClassSite) -> bool:
    """Whether a module runs the method of the class site, neither shadowed nor overridden."""
    own = untouched(type(module), site.name)[1]
    return shadow(module, site.name) is MISSING and own is site.untouched()


@contextmanager
def _installed(probes: Sequence[_Probe]) -> Iterator[None]:
    saved = [vars(probe.module).get(probe.name, MISSING) for probe in probes]
    try:
        for probe in probes:
            vars(probe.module)[probe.name] = probe.bound()
        yield
    finally:
        for probe, value in zip(probes, saved, strict=True):
            if value is MISSING:
                vars(probe.module).pop(probe.name, None)
            else:
                vars(probe.module)[probe.name] = value


def _forked_rng() -> AbstractContextManager[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(devices=list(devices))


def _rng() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _copy(module: nn.Module) -> nn.Module:
    """A deep copy, also of modules with tensors computed from parameters (weight norm), which deepcopy refuses."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo)


def _doubled(module: nn.Module) -> nn.Module:
    module.double()
    for part in module.modules():
        vars(part).update(
            {name: _double(value) for name, value in vars(part).items() if isinstance(value, torch.Tensor)}
        )
    return module


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _to_double(values: Any) -> Any:
    return tree_map(_double, values)


def _clone(values: Any) -> Any:
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, values)


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(_plain(value))
    return [
        leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]


def _plain(value: Any) -> Any:
    """A dataclass (Kokoro's output) as a dictionary, so that its tensors are found."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _worst(errors: Iterator[float | None]) -> float | None:
    return max((error for error in errors if error is not None), default=None)


def _figure(error: float | None) -> str:
    return "–" if error is None else f"{error:.2e}"
