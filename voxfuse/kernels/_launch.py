"""Launching a kernel that is compiled already at a fraction of Triton's host cost.

``kernel[grid](...)`` binds and specialises every argument in Python at each call: 16 µs for 17 arguments on the host of
an H200, where the launch itself takes 5.5. Here the compiled kernel is remembered by what Triton specialises on, and
called directly, with addresses: of a tensor Triton's launcher asks the driver where its memory is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from voxfuse.kernels._triton import INTERPRETED, triton

ALIGNED_BYTES = 16  # what Triton specialises an address on
_compiled: dict[tuple[Any, ...], Any] = {}
_watching = threading.local()
_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # as Triton's driver


class Launch(NamedTuple):
    """A launch: its pointers, then every other argument. ``compiled``: None where it is for these pointers alone."""

    compiled: Any
    programs: int
    pointers: Sequence[torch.Tensor | None]
    others: tuple[Any, ...]


def launch(
    kernel: Any,
    programs: int,
    pointers: Sequence[torch.Tensor | None],
    integers: Sequence[int],
    floats: Sequence[float],
    constants: tuple[Any, ...],
    options: tuple[tuple[str, int], ...],
) -> None:
    """Launch ``programs`` programs on the current device and stream.

    The kernel's parameters must be, in this order: pointers, integers, floats, constexpr ``constants``. ``options`` are
    launch options such as ``num_warps``. The first pointer is a tensor.
    """
    others = (*integers, *map(float, floats), *constants)  # a number without a fraction is an integer to Triton
    addresses = [None if pointer is None else pointer.data_ptr() for pointer in pointers]
    if INTERPRETED or not _aligned(addresses) or _large(pointers):  # rare, and each pointer counts by itself
        compiled = None
        kernel[(programs,)](*pointers, *others, **dict(options))
    else:
        device = pointers[0].device  # type: ignore[union-attr]
        key = (
            id(kernel),
            device,
            constants,
            options,
            *[None if pointer is None else pointer.dtype for pointer in pointers],
            *[(value == 1) | (value & 15 == 0) << 1 | (value > 0x7FFFFFFF) << 2 for value in integers],
        )
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = _compiled[key] = kernel[(programs,)](*pointers, *others, **dict(options))
        else:
            enqueue(compiled, device.index, programs, addresses, others)
    launches: list[Launch] | None = getattr(_watching, "launches", None)
    if launches is not None:
        launches.append(Launch(compiled, programs, pointers, others))


def _large(pointers: Sequence[torch.Tensor | None]) -> bool:
    """Whether one lies in memory of more than 2 GiB, for which Triton compiles other kernels on ROCm."""
    if torch.version.hip is None:
        return False
    return any(pointer is not None and pointer.untyped_storage().nbytes() > 0x7FFFFFFF for pointer in pointers)


def _aligned(addresses: Sequence[int | None]) -> bool:
    """Whether kernels that were compiled for aligned addresses may be given these."""
    bits = 0
    for address in addresses:
        bits |= address or 0
    return bits & (ALIGNED_BYTES - 1) == 0


def enqueue(
    compiled: Any, device: int, programs: int, addresses: Sequence[int | None], others: tuple[Any, ...]
) -> None:
    """Launch a compiled kernel on the current stream of the current device, which is ``device``.

    The call of ``CompiledKernel.run`` in Triton 3.6 and 3.7. Their launch hooks are called where there are any: they
    are chains, usually empty, for which Triton would make launch metadata at every call.
    """
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        compiled[(programs, 1, 1)](*addresses, *others)
        return
    stream = _stream(device)  # type: ignore[misc]
    launched = compiled.function, compiled.packed_metadata, None, None, None  # no metadata, no hooks
    compiled.run(programs, 1, 1, stream, *launched, *addresses, *others)


@contextmanager
def watched() -> Iterator[list[Launch]]:
    """The launches of this thread inside."""
    launches: list[Launch] = []
    _watching.launches = launches
    try:
        yield launches
    finally:
        _watching.launches = None
