"""What became of every fusion on every target: entries that read their counters live, as records, table and files."""

from __future__ import annotations

import io
import itertools
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from voxfuse.kernels._op import TALLIES
from voxfuse.patches.errors import PatchWarning
from voxfuse.records import Backend, Receipt, Status, to_json

TABLE_COLUMNS = 160  # width of the report in characters
_file_numbers = itertools.count()


class Why(Enum):
    """The kind of reason behind an entry: ``strict`` raises for FAILED only."""

    APPLIED = "applied, or would be (dry run)"
    CHOSEN = "left out by policy, include, exclude or environment"
    ABSENT = "the stack or the class is not there"
    FAILED = "wanted, but cannot be applied"


@dataclass
class Entry:
    """One fusion on one target; ``keys`` are the receipt keys on which its calls count."""

    fusion: str
    stack: str
    target: str
    status: Status
    why: Why
    reason: str | None = None
    count: int = 0
    backend: Backend | None = None
    keys: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    explicit: bool = True  # the target was named, not found by default

    def receipt(self) -> Receipt:
        tallies = [TALLIES.of(key) for key in self.keys]
        fallbacks: Counter[str] = Counter()
        for tally in tallies:
            fallbacks.update(dict(tally.fallbacks))
        return Receipt(
            fusion=self.fusion,
            stack=self.stack,
            target=self.target,
            count=self.count,
            status=self.status,
            reason=self.reason,
            backend=self.backend,
            calls=sum(tally.calls for tally in tallies),
            fallbacks=dict(fallbacks),
            process_id=os.getpid(),
            versions=self.versions,
        )


def table(receipts: Sequence[Receipt]) -> str:
    """The receipts as a table. An applied fusion that never ran says ``never called``."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title="voxfuse patches", title_justify="left")
    for column in ("fusion", "stack", "target", "count", "status", "backend", "calls", "fallbacks", "reason"):
        grid.add_column(column, justify="right" if column in ("count", "calls") else "left", overflow="fold")
    for receipt in receipts:
        fallbacks = "\n".join(f"{count}: {reason}" for reason, count in receipt.fallbacks.items())
        ran = receipt.calls or receipt.fallbacks
        idle = {"applied": "never called", "reverted": "0"}.get(receipt.status, "")
        grid.add_row(
            receipt.fusion,
            receipt.stack,
            receipt.target,
            str(receipt.count),
            receipt.status,
            receipt.backend or "",
            str(receipt.calls) if ran else idle,
            fallbacks,
            receipt.reason or "",
        )
    out = io.StringIO()
    Console(file=out, width=TABLE_COLUMNS, markup=False, emoji=False, highlight=False).print(grid)
    return out.getvalue()


class ReceiptFile:
    """A JSON array of receipts in a folder, one file per process and set of patches, replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = next(_file_numbers)

    @property
    def path(self) -> Path:
        """Where this process writes; a forked child has a file of its own."""
        return self._folder / f"receipts-{os.getpid()}-{self._number}.json"

    def write(self, receipts: Sequence[Receipt]) -> None:
        """Replace the file. Where the folder cannot be written, a PatchWarning says so: speech goes on."""
        data = b"[\n" + b",\n".join(to_json(receipt).rstrip() for receipt in receipts) + b"\n]\n"
        temporary = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._folder, suffix=".part")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, self.path)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            warnings.warn(f"VOXFUSE_RECEIPTS: receipts not written: {error}", PatchWarning, stacklevel=2)
