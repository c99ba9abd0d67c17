"""Profiling a command: every Python process in it records a window of its own work, without a change to its code.

``environment`` gives the variables that make it so: a folder first on PYTHONPATH with a ``sitecustomize`` that calls
``start`` here. A thread then waits for torch, lets the process warm up, records all threads for a while, and writes
``trace-PID.json.gz``. Nothing of torch is imported before the process itself does so. What recording costs shows in the
module calls per second, counted for as long before without the profiler: ``calls-PID.json``.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "_VOXFUSE_PROFILE"
POLL_S = 0.05
LAST_S = 120.0  # what a process waits at its end for its trace to be written
MAIN_THREAD_S = 60.0
_kept: list[Any] = []
SITECUSTOMIZE = '''"""Written by voxfuse profile: starts the recorder, then runs the sitecustomize that it hides."""
import sys

try:
    from voxfuse.profiles import follow

    follow.start()
except Exception as error:
    print(f"voxfuse profile: this process is not recorded: {error!r}", file=sys.stderr)
sys.path[:] = [entry for entry in sys.path if entry != __file__.rpartition("/")[0]]
_this = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = _this
'''


def environment(
    out: Path, folder: Path, skip_s: float, record_s: float, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a command whose processes write traces into ``out``; ``folder`` is for files of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    package = Path(__file__).resolve().parents[2]
    paths = [str(folder.resolve()), *filter(None, [inherited.get("PYTHONPATH")]), str(package)]
    settings = {"out": str(out.resolve()), "skip_s": skip_s, "record_s": record_s}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(settings)}


def start() -> None:
    """Begin to wait for torch in this process, where the environment asks for it."""
    settings = os.environ.get(VARIABLE)
    if settings is None:
        return
    finish = threading.Event()
    thread = threading.Thread(target=_follow, args=(json.loads(settings), finish), name="voxfuse-profile", daemon=True)

    def at_end() -> None:
        finish.set()
        thread.join(LAST_S)

    atexit.register(at_end)
    thread.start()


def _follow(settings: dict[str, Any], finish: threading.Event) -> None:
    while not _torch_is_here():
        if finish.wait(POLL_S):
            return
    if finish.wait(settings["skip_s"]):
        return
    try:
        _record(Path(settings["out"]) / f"trace-{os.getpid()}.json.gz", settings["record_s"], finish)
    except Exception as error:  # whatever it is, it must not end the process that is looked at
        print(f"voxfuse profile: process {os.getpid()} has no trace: {error!r}", file=sys.stderr)


def _torch_is_here() -> bool:
    for name in ("torch", "torch.profiler"):
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            return False
    return True


def _record(path: Path, seconds: float, finish: threading.Event) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    _prepare(finish)
    count = Count()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    plain = _calls_per_second(count, seconds, finish)
    handle.remove()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=activities, record_shapes=True, acc_events=True, experimental_config=every_thread
    ) as recorded:
        handles, calls = _mark_modules(torch)
        profiled = _calls_per_second(calls, seconds, finish)
        for handle in handles:
            handle.remove()
        if len(activities) == 2:
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"unfinished-{path.name}")
    recorded.export_chrome_trace(str(unfinished))
    rates = {"plain_calls_per_s": plain, "profiled_calls_per_s": profiled}
    path.with_name(path.name.replace("trace-", "calls-").removesuffix(".gz")).write_text(json.dumps(rates))
    unfinished.replace(path)


def _prepare(finish: threading.Event) -> None:
    """Let Kineto set itself up, which it does only on the thread that imported torch: the main one, as a rule.

    Python runs the call there between two bytecodes, so a main thread that waits in C delays it. The call also imports
    what torch.profiler imports once it has started, for seconds; imports from a second thread break those of the main
    one. Raises TimeoutError, or what went wrong there.
    """
    done = threading.Event()
    faults: list[BaseException] = []

    def set_up(_: Any) -> int:
        try:
            importlib.import_module("torch._inductor.config")
            with importlib.import_module("torch.autograd.profiler").profile():
                pass
        except BaseException as error:
            faults.append(error)
        done.set()  # not before the profiler's end: there is one in a process
        return 0

    call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(set_up)
    _kept.append(call)  # Python may run it late
    ctypes.pythonapi.Py_AddPendingCall(call, None)
    until = time.monotonic() + MAIN_THREAD_S
    while not done.wait(POLL_S):
        if time.monotonic() > until or finish.is_set():
            raise TimeoutError(
                f"its main thread ran no Python for {MAIN_THREAD_S:g} s, or ended: profile it under load"
            )
    if faults:
        raise faults[0]


class Count:
    """A forward hook that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


def _calls_per_second(count: Count, seconds: float, finish: threading.Event) -> float:
    before, begin = count.calls, time.monotonic()
    finish.wait(seconds)
    return (count.calls - before) / (time.monotonic() - begin)


def _mark_modules(torch: Any) -> tuple[tuple[Any, Any], Count]:
    """Open a range with the class around every call of a module, on whichever thread, and count the calls."""
    calls = threading.local()
    count = Count()

    def before(module: Any, _: Any) -> None:
        count()
        if not torch.compiler.is_compiling():
            opened = torch.profiler.record_function(f"nn.Module: {type(module).__name__}_0")
            opened.__enter__()
            calls.open = [*getattr(calls, "open", ()), opened]

    def after(*_: Any) -> None:
        if not torch.compiler.is_compiling() and getattr(calls, "open", None):
            calls.open.pop().__exit__(None, None, None)

    hooks = torch.nn.modules.module
    handles = (
        hooks.register_module_forward_pre_hook(before),
        hooks.register_module_forward_hook(after, always_call=True),
    )
    return handles, count


def overhead(traces: Iterable[Path]) -> dict[str, float]:
    """Module calls per second without and with the profiler, of the process that made the most; empty without any."""
    rates: list[dict[str, float]] = [
        json.loads(path.with_name(path.name.replace("trace-", "calls-").removesuffix(".gz")).read_text())
        for path in traces
    ]
    busiest = max(rates, key=lambda rate: rate["plain_calls_per_s"], default={})
    if not busiest or not busiest["plain_calls_per_s"] or not busiest["profiled_calls_per_s"]:
        return {}
    return {**busiest, "ratio": busiest["plain_calls_per_s"] / busiest["profiled_calls_per_s"]}


def wait_for_traces(out: Path, seconds: float) -> list[Path]:
    """The traces in a folder, once none is being written any more."""
    until = time.monotonic() + seconds
    while any(out.glob("unfinished-trace-*")) and time.monotonic() < until:
        time.sleep(POLL_S)
    return sorted(out.glob("trace-*.json.gz"))
