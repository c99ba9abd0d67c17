"""What the launcher of an operation does with arguments of given shapes, remembered: allocations and launches.

A launcher works out block sizes, strides and launch options in Python at each call, though they follow from its scalars
and from shapes, strides, types and the device of its tensors; its envelope asks for these and whether convolutions may
use TF32. When a call with the same of all these is seen for the second time, the launcher runs under a dispatch mode
that notes what it allocates and launches; further calls do that alone. A launcher that does more than allocate, take
views and launch (a convolution, a constant that it keeps) has no plan and runs as it is; neither has a call with
unaligned tensors, for which Triton compiles other kernels. Not on ROCm, where Triton's kernels also depend on the size
of what a tensor is a view of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from voxfuse.kernels._launch import ALIGNED_BYTES, Launch, enqueue, watched

MOST = 4096  # plans of an operation; then it begins anew
SEEN, NOT_PLANNED = "seen once", "not to be planned"
NOTHING = -1  # the place of a pointer that is None
EMPTY = ("aten::empty.memory_format", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
_all: weakref.WeakSet[Plans] = weakref.WeakSet()


class Plan(NamedTuple):
    """Allocations (shape, strides, type); launches, with places of their pointers among arguments, then allocations;
    the places of the results among the allocations. One result is not in a tuple where ``single``."""

    device: torch.device
    made: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    launches: list[tuple[Any, int, list[int], tuple[Any, ...]]]
    results: list[int]
    single: bool

    def run(self, addresses: list[int | None]) -> Any:
        """Do it with arguments at these addresses, on the current stream of the device, which must be current."""
        device, index = self.device, self.device.index
        made = [torch.empty_strided(size, steps, dtype=dtype, device=device) for size, steps, dtype in self.made]
        places = [*addresses, *[tensor.data_ptr() for tensor in made], None]  # a place of NOTHING is the last
        for compiled, programs, pointers, others in self.launches:
            enqueue(compiled, index, programs, [places[place] for place in pointers], others)
        return made[self.results[0]] if self.single else tuple([made[place] for place in self.results])


def signature(args: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, list[int | None]]:
    """What a plan is found by, or None for arguments that have none, and the addresses of the tensors, in order."""
    key: list[Any] = [torch._C._get_fp32_precision_getter("cuda", "conv")]  # what an envelope may ask for besides
    addresses: list[int | None] = []
    bits = 0
    for arg in args:
        if isinstance(arg, torch.Tensor):
            key += arg.shape, arg.stride(), arg.dtype, arg.device
            address = arg.data_ptr()
            bits |= address
            addresses.append(address)
        else:
            key.append(tuple(arg) if isinstance(arg, list) else arg)
    if bits & (ALIGNED_BYTES - 1) or torch.version.hip is not None:
        return None, addresses
    return tuple(key), addresses


class Plans:
    """The plans of one launcher."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        self._plans: dict[tuple[Any, ...], Plan | str] = {}
        _all.add(self)

    def find(self, key: tuple[Any, ...]) -> Plan | None:
        """The plan of calls with this key, if there is one."""
        plan = self._plans.get(key)
        return plan if isinstance(plan, Plan) else None

    def call(self, key: tuple[Any, ...], *args: Any) -> Any:
        """Call the launcher, and plan for calls with this key at its second time."""
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= MOST:
                self._plans.clear()
            self._plans[key] = SEEN
        elif known is SEEN:
            with _Watch() as watch, watched() as launches:
                result = self._launch(*args)
            self._plans[key] = watch.plan(args, launches, result) or NOT_PLANNED
            return result
        return self._launch(*args)


def forget() -> None:
    """Forget all plans: launch options changed."""
    for plans in list(_all):
        plans._plans.clear()


class _Watch(TorchDispatchMode):
    """Notes allocations, and whether anything was done besides."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[torch.Tensor] = []
        self._more = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in EMPTY:
            self._made.append(result)
        elif not func.is_view:
            self._more = True
        return result

    def plan(self, args: tuple[Any, ...], launches: list[Launch], result: Any) -> Plan | None:
        """The plan of what was seen, or None where it cannot be done again with other tensors."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        held = [*tensors, *self._made]
        single = isinstance(result, torch.Tensor)
        results = [_made_as(tensor, self._made) for tensor in ([result] if single else result)]
        pointers = [
            [NOTHING if pointer is None else _place(pointer, held) for pointer in launch.pointers]
            for launch in launches
        ]
        if (
            self._more
            or not launches
            or any(launch.compiled is None for launch in launches)
            or None in results
            or any(None in places for places in pointers)
            or any(tensor.device != tensors[0].device for tensor in self._made)
        ):
            return None
        return Plan(
            tensors[0].device,
            [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in self._made],
            [
                (launch.compiled, launch.programs, places, launch.others)  # type: ignore[misc]
                for launch, places in zip(launches, pointers, strict=True)
            ],
            results,  # type: ignore[arg-type]
            single,
        )


def _place(tensor: torch.Tensor, among: list[torch.Tensor]) -> int | None:
    """Where a tensor, or what it is a view of from its first element on, is; None where that cannot be told: then an
    address alone does not say which of two it belongs to."""
    same = [place for place, other in enumerate(among) if other is tensor]
    if not same:
        storage = tensor.untyped_storage().data_ptr()
        same = [place for place, other in enumerate(among) if other.untyped_storage().data_ptr() == storage]
    if len(same) != 1 or among[same[0]].data_ptr() != tensor.data_ptr():
        return None
    return same[0]


def _made_as(tensor: torch.Tensor, made: list[torch.Tensor]) -> int | None:
    """Where a result is; None for a view of other shape, strides or type than what was allocated."""
    place = _place(tensor, made)
    if place is None or (tensor.shape, tensor.stride(), tensor.dtype) != (
        made[place].shape,
        made[place].stride(),
        made[place].dtype,
    ):
        return None
    return place
