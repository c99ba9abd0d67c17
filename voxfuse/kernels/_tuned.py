"""Launch options of kernels, read from the checked-in table ``tuned.json``: never searched for in a serving path.

A row belongs to (operation, shape class, compute capability). The operation names its shape classes itself; the
capability is "9.0" on CUDA, the architecture ("gfx942") on ROCm, or "*" for every GPU without a row of its own, the
interpreter included. ``voxfuse bench --tune`` writes rows; ``measured`` says on what, where they were measured at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from voxfuse.kernels import _plans
from voxfuse.records import Record

PATH = Path(__file__).with_name("tuned.json")
ANY = "*"
PORTABLE_OPTIONS = ("num_warps", "num_stages")
BLOCK_OPTIONS = ("block_n", "block_k", "programs")  # a kernel's own sizes, programs by processor
CUDA_OPTIONS = ("maxnreg",)  # no row for every GPU may hold these

Options = tuple[tuple[str, int], ...]


class Row(Record, frozen=True, kw_only=True):
    """One line of the table. ``measured``: GPU, versions, µs before and after; empty where nothing was measured."""

    operation: str
    shape_class: str
    compute_capability: str
    options: dict[str, int]
    measured: dict[str, str | float] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What a row is found by."""
        return self.operation, self.shape_class, self.compute_capability


def read(path: Path = PATH) -> dict[tuple[str, str, str], Row]:
    """The rows of a table by key. Raises ValueError, naming the row, where it is not such a table."""
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=tuple[Row, ...])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a table of launch options: {error}") from error
    table: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        allowed = PORTABLE_OPTIONS + BLOCK_OPTIONS + (CUDA_OPTIONS if row.compute_capability != ANY else ())
        if odd := [name for name, value in row.options.items() if name not in allowed or value < 1]:
            raise ValueError(f"{path}: {row.key}: expected positive {', '.join(allowed)}, got {', '.join(odd)}")
        if row.key in table:
            raise ValueError(f"{path}: {row.key} is there twice")
        table[row.key] = row
    return table


def write(rows: Iterable[Row], path: Path = PATH) -> None:
    """Add rows to a table, in place of those with the same key; one row a line, so that a change reads as one."""
    table = (read(path) if path.exists() else {}) | {row.key: row for row in rows}
    lines = b",\n".join(msgspec.json.encode(table[key]) for key in sorted(table))
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(b"[\n" + lines + b"\n]\n")
    read(partial)  # what cannot be read must not take the place of what can
    partial.replace(path)


_TABLE = read()


def lookup(operation: str, shape_class: str, compute_capability: str | None) -> Options:
    """The launch options of a shape class on a GPU (None: no GPU). Raises KeyError for a class without any row."""
    for capability in (compute_capability, ANY):
        row = _TABLE.get((operation, shape_class, capability or ANY))
        if row is not None:
            return tuple(row.options.items())
    raise KeyError(f"no launch options for {operation!r}, shape class {shape_class!r}: add a row '*' to {PATH.name}")


@functools.cache
def options(operation: str, shape_class: str, device: torch.device) -> Options:
    """The launch options of a shape class on a device; cached, since this is asked at every call."""
    return lookup(operation, shape_class, capability_of(device))


def capability_of(device: torch.device) -> str | None:
    """By what a device's rows are found: "9.0", "gfx942", or None without a GPU."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


@contextmanager
def trying(operation: str, shape_class: str, device: torch.device, candidate: dict[str, int]) -> Iterator[None]:
    """Use other launch options inside, in this process: for tuning, which no other thread may run beside."""
    key = (operation, shape_class, capability_of(device) or ANY)
    before = _TABLE.get(key)
    _TABLE[key] = Row(operation=operation, shape_class=shape_class, compute_capability=key[2], options=candidate)
    options.cache_clear()
    _plans.forget()
    try:
        yield
    finally:
        if before is None:
            del _TABLE[key]
        else:
            _TABLE[key] = before
        options.cache_clear()
        _plans.forget()
