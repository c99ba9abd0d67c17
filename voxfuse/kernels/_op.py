"""The op layer: one decorator gives an operation its backends, envelope, counters and custom op.

A fused operation is called as ``op(*tensors, *scalars, run=Run(backend, receipt))``. In eager mode the launcher runs
directly (a custom op costs 60 to 110 µs of host time a call: flash-attention #2818); under Dynamo, a dispatch mode or
with tensor subclasses the call goes through ``torch.ops.voxfuse.<name>``, which has a fake implementation. The
decision between kernel and reference is taken inside, at run time, in both cases, and counted on the receipt.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from voxfuse.kernels._plans import Plans, signature
from voxfuse.kernels._triton import INTERPRETED, TRITON_VERSION
from voxfuse.records import Backend


class Run(NamedTuple):
    """How a fused call runs and on whose account: backend and receipt key."""

    backend: Backend
    receipt: str


REFERENCE = Run("reference", "unattributed")


Counts = Counter[tuple[str, str | None]]  # calls by receipt key and reason of the fallback (None: fused)


class Tally:
    """Calls and fallbacks of one receipt; graph runners add their replays with ``add_all``."""

    def __init__(self) -> None:
        self.calls = 0
        self.fallbacks: Counter[str] = Counter()


class _Tallies:
    def __init__(self) -> None:
        self._by_receipt: dict[str, Tally] = {}
        self._lock = threading.Lock()
        self._diverted = threading.local()

    def of(self, receipt: str) -> Tally:
        """The tally of a receipt key, made on first use."""
        with self._lock:
            return self._by_receipt.setdefault(receipt, Tally())

    def add(self, receipt: str, calls: int = 1, fallback: str | None = None) -> None:
        """Count fused calls, or calls that ran the upstream chain for the given reason."""
        diverted: Counts | None = getattr(self._diverted, "counts", None)
        if diverted is not None:
            diverted[receipt, fallback] += calls
            return
        tally = self._by_receipt.get(receipt) or self.of(receipt)
        with self._lock:
            if fallback is None:
                tally.calls += calls
            else:
                tally.fallbacks[fallback] += calls

    def add_all(self, counts: Counts) -> None:
        """Count what ``diverted`` gave once more: a replay does again what its capture did."""
        for (receipt, fallback), calls in counts.items():
            self.add(receipt, calls, fallback)

    @contextmanager
    def diverted(self) -> Iterator[Counts]:
        """Collect what this thread counts inside, instead of counting it."""
        outer = getattr(self._diverted, "counts", None)
        counts: Counts = Counter()
        self._diverted.counts = counts
        try:
            yield counts
        finally:
            self._diverted.counts = outer


TALLIES = _Tallies()
OPS: dict[str, FusedOp] = {}


def backend_unavailable(backend: Backend) -> str | None:
    """Why a backend cannot run in this process, or None.

    ``triton`` needs a CUDA or ROCm GPU and Triton; ``interpreter`` needs Triton with TRITON_INTERPRET=1 set before
    voxfuse's kernels were imported; ``reference`` always runs.
    """
    if backend == "reference":
        return None
    if TRITON_VERSION is None:
        return "Triton is not installed: pip install triton"
    if backend == "interpreter":
        if not INTERPRETED:
            return "backend 'interpreter' needs VOXFUSE_BACKEND=interpreter in the environment before Python starts"
        return None
    if INTERPRETED:
        return "TRITON_INTERPRET=1 is set, so kernels are interpreted: unset it, or use backend='interpreter'"
    if not torch.cuda.is_available():
        return "no GPU: backend 'triton' needs one; backend='reference' runs on a CPU"
    return None


class FusedOp:
    """A fused operation: ``launch`` (kernel), ``reference`` (upstream chain), ``unsupported`` (envelope)."""

    def __init__(
        self,
        name: str,
        schema: str,
        launch: Callable[..., Any],
        reference: Callable[..., Any],
        unsupported: Callable[..., str | None],
        fake: Callable[..., Any],
    ) -> None:
        self.name = name
        self.launch = launch
        self._plans = Plans(launch)
        self.reference = reference
        self.unsupported = unsupported
        functools.update_wrapper(self, launch)
        arguments, returns = schema.split(" -> ")
        self._custom_op = torch.library.custom_op(
            f"voxfuse::{name}",
            lambda *args: self._run(args[:-2], Run(*args[-2:])),
            mutates_args=tuple(_WRITTEN.findall(arguments)),
            schema=f"{arguments[:-1]}, str backend, str receipt) -> {returns}",
        )
        self._custom_op.register_fake(lambda *args: fake(*args[:-2]))

    def __call__(self, *args: Any, run: Run) -> Any:
        if torch.compiler.is_compiling() or needs_dispatch(args):
            if not torch.compiler.is_compiling() and _distributed(args):
                TALLIES.add(run.receipt, fallback="a tensor is a DTensor: fused ops have no sharding rules")
                return self.reference(*args)
            return self._custom_op(*args, run.backend, run.receipt)
        return self._run(args, run)

    def _run(self, args: tuple[Any, ...], run: Run) -> Any:
        if run.backend == "reference":
            TALLIES.add(run.receipt)
            return self.reference(*args)
        key = None
        if run.backend == "triton" and not (torch.is_grad_enabled() and _differentiable(args)):
            key, addresses = signature(args)
            plan = None if key is None else self._plans.find(key)
            if plan is not None:
                TALLIES.add(run.receipt)
                if plan.device.index == torch.cuda.current_device():
                    return plan.run(addresses)
                with torch.cuda.device(plan.device):
                    return plan.run(addresses)
        device, reason = _placement(args, run.backend)
        reason = reason or self.unsupported(*args)
        if reason is not None:
            TALLIES.add(run.receipt, fallback=reason)
            return self.reference(*args)
        TALLIES.add(run.receipt)
        launch = self.launch if key is None else functools.partial(self._plans.call, key)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return launch(*args)
        return launch(*args)


def _differentiable(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def _placement(args: tuple[Any, ...], backend: Backend) -> tuple[torch.device, str | None]:
    """The device of the tensors, and why their placement or autograd state rules a kernel out, or None."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    device = tensors[0].device
    if backend == "triton" and device.type != "cuda":
        return device, "a tensor is not on the GPU"
    for tensor in tensors:
        if tensor.device != device:
            return device, "tensors are on different devices"
    if torch.is_grad_enabled() and _differentiable(args):
        return device, "an input needs a gradient; call under torch.no_grad() or torch.inference_mode()"
    return device, None


def _distributed(args: tuple[Any, ...]) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not imported: nobody can have made one
    return module is not None and any(isinstance(arg, module.DTensor) for arg in args)


def needs_dispatch(args: tuple[Any, ...]) -> bool:
    """Whether a dispatch mode or transform is active, or an argument is a tensor subclass (DTensor, fake tensor)."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    for arg in args:  # noqa: SIM110, as a generator costs twice as much, and this is asked at every call
        if type(arg) not in _PLAIN and isinstance(arg, torch.Tensor):
            return True
    return False


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WRITTEN = re.compile(r"Tensor\(\w+!\)\?? (\w+)")  # arguments that a schema marks as written


def fused_op(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    unsupported: Callable[..., str | None],
    fake: Callable[..., Any],
) -> Callable[[Callable[..., Any]], FusedOp]:
    """Make a launcher a fused operation.

    ``schema`` is a torch.library schema of the launcher's positional arguments; ``reference`` is the exact upstream
    chain, ``unsupported`` gives the reason why a call is outside the envelope (or None), ``fake`` makes empty outputs.
    All take the launcher's arguments; outputs must not alias inputs, and an input that is written (a cache) is marked
    in the schema, as ``Tensor(a!)``.
    """

    def register(launch: Callable[..., Any]) -> FusedOp:
        op = FusedOp(name, schema, launch, reference, unsupported, fake)
        OPS[name] = op
        return op

    return register
