"""Recording a steady-state trace of a workload in this process, with stages and module paths marked in it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from voxfuse.profiles.marks import REQUEST, STAGE, module_mark

UNMARKED = (nn.Identity, nn.Dropout, nn.ModuleList, nn.ModuleDict)  # nothing of theirs could be a hotspot
Request = tuple[str, Callable[[], Any]]  # a name, and what to do


class Stage(NamedTuple):
    """A stage of a stack. ``module`` is the path of the module whose calls it is, or "" for what lies outside others.

    ``component`` is its branch of the runtime tree, one of ``components.COMPONENTS``.
    """

    name: str
    component: str
    module: str = ""


class Recording(NamedTuple):
    """``walls_s`` are seconds per request; ``starts`` are ``time.perf_counter()`` at each request's begin."""

    walls_s: list[float]
    starts: list[float]


def run(requests: Sequence[Request], device: torch.device, stage: str | None = None) -> Recording:
    """Serve requests one after another, each marked, the device synchronised at the end of each."""
    walls, starts = [], []
    for name, serve in requests:
        starts.append(time.perf_counter())
        with record_function(f"{REQUEST}{name}"), _stage(stage):
            serve()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        walls.append(time.perf_counter() - starts[-1])
    return Recording(walls, starts)


def record(requests: Sequence[Request], device: torch.device, path: Path, stage: str | None = None) -> Recording:
    """Serve requests under torch's profiler and write the trace (``.json`` or ``.json.gz``).

    Everything must have run before: a trace with compilation in it is refused by the analysis. The first request is
    served once more before, under a profiler whose trace is dropped: in its first session CUPTI allocates its buffers.
    """
    with _profiler(device):
        run(requests[:1], device, stage)
    with _profiler(device) as recorded:
        recording = run(requests, device, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))
    return recording


def _profiler(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, record_shapes=True, acc_events=True)


@contextlib.contextmanager
def marked(model: nn.Module, stages: Sequence[Stage] = ()) -> Iterator[None]:
    """Mark calls of a model's modules and stages in whatever profile is taken inside.

    Compiled and scripted modules are marked as one, without what is inside them: a hook there would compile them anew.
    Raises ValueError where a stage names a module that the model does not have.
    """
    paths = dict(model.named_modules())
    unknown = [stage.module for stage in stages if stage.module and stage.module not in paths]
    if unknown:
        name = type(model).__name__
        raise ValueError(f"{name} has no module {', '.join(unknown)}: the driver's stages do not fit it")
    stage_of = {stage.module: stage.name for stage in stages if stage.module}
    opaque = [
        f"{path}." if path else ""
        for path, module in paths.items()
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
    ]
    with contextlib.ExitStack() as hooks:
        for path, module in paths.items():
            inside = any(path != prefix.rstrip(".") and path.startswith(prefix) for prefix in opaque)
            if inside or isinstance(module, (*UNMARKED, torch.jit.ScriptModule)):
                continue
            marks = [f"{STAGE}{stage_of[path]}"] if path in stage_of else []
            _mark(module, [*marks, module_mark(path, _classes(path, paths))], hooks)
        yield


def _classes(path: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Classes of the modules that a path leads through (without the root), its own last."""
    parts = path.split(".")
    return [type(modules[".".join(parts[:count])]).__name__ for count in range(1, len(parts) + 1)]


def _mark(module: nn.Module, names: list[str], hooks: contextlib.ExitStack) -> None:
    """Open ranges of these names around each call of a module, also one that raises."""
    calls = threading.local()

    def before(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            ranges = contextlib.ExitStack()
            for name in names:
                ranges.enter_context(record_function(name))
            calls.open = [*getattr(calls, "open", ()), ranges]

    def after(*_: Any) -> None:
        if not torch.compiler.is_compiling() and getattr(calls, "open", None):
            calls.open.pop().close()

    for handle in (
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ):
        hooks.callback(handle.remove)


def _stage(name: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if name is None else record_function(f"{STAGE}{name}")
