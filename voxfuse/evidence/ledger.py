"""The ledger: one JSON file per verdict, append-only.

Verdicts lie in ``voxfuse/evidence/records/<gpu>/<record>-<fusion or stack>-<case or protocol>-<date>.json``; the
environment variable VOXFUSE_LEDGER adds one folder of the user's own, of the same form. Records are never rewritten:
a newer measurement of the same thing is a further file, and the newest one counts.

A micro record that claims more than its samples carry is refused, when written and when read (``voxfuse.recompute``).
What the verdicts allow is in ``acceptance.py``.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from voxfuse import records
from voxfuse.recompute import inconsistency
from voxfuse.records import GateVerdict, MicroVerdict

SHIPPED = Path(__file__).parent / "records"
USER_FOLDER_VARIABLE = "VOXFUSE_LEDGER"
MAX_BYTES = 64 << 20  # a full gate verdict is below 1 MB

Verdict = MicroVerdict | GateVerdict


class LedgerWarning(UserWarning):
    """A file or folder of the ledger that could not be used."""


class Entry(NamedTuple):
    """One verdict and the file that it came from."""

    path: Path
    verdict: Verdict


def folders() -> tuple[Path, ...]:
    """The folders that make up the ledger: the shipped one and the user's, where VOXFUSE_LEDGER names one."""
    user = os.environ.get(USER_FOLDER_VARIABLE)
    return (SHIPPED, Path(user)) if user else (SHIPPED,)


def files(where: Iterable[Path] | None = None) -> Iterator[Path]:
    """The files of the ledger (or of the given folders). A folder that does not exist is named in a LedgerWarning."""
    for folder in folders() if where is None else where:
        if folder.is_dir():
            yield from sorted(folder.rglob("*.json"))
        elif folder != SHIPPED:
            _warn(f"the ledger folder {folder} does not exist: make it, or unset {USER_FOLDER_VARIABLE}")


def load(where: Iterable[Path] | None = None) -> list[Entry]:
    """Every verdict of the ledger (or of the given folders), oldest first.

    A file that holds no verdict, or one that claims what its samples do not carry, is named in a LedgerWarning and
    skipped: one bad file must not take the others away.
    """
    entries = []
    for path in files(where):
        try:
            status = path.stat()
            verdict, fault = _read_checked(path, status.st_mtime_ns, status.st_size)
        except (OSError, ValueError, RecursionError) as error:
            _warn(f"skipped a record of the ledger: {error if str(path) in str(error) else f'{path}: {error}'}")
            continue
        if fault is None:
            entries.append(Entry(path, verdict))
        else:
            _warn(f"skipped a record of the ledger: {path}: it does not follow from its samples: {fault}")
    return sorted(entries, key=lambda entry: moment(entry.verdict))


def read(path: Path) -> Verdict:
    """The verdict in a file, whether or not it follows from its samples.

    Raises ValueError, naming the file, where it holds none or is too large.
    """
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path}: {size} bytes, more than the {MAX_BYTES} that a verdict may have")
    record = records.read(path)
    if not isinstance(record, (MicroVerdict, GateVerdict)):
        raise ValueError(f"{path}: holds a {type(record).__name__}, not a verdict")
    moment(record)
    return record


def append(verdict: Verdict, folder: Path) -> Path:
    """Write a verdict into a ledger folder and return its path; another of the same second gets a number.

    Raises FileExistsError where that verdict is already there (records are never overwritten), TypeError where the
    record is not a verdict, and ValueError where ``measured_at`` is not an ISO 8601 time or a micro verdict does not
    follow from its samples.
    """
    if not isinstance(verdict, (MicroVerdict, GateVerdict)):
        raise TypeError(f"the ledger holds micro and gate verdicts, not {type(verdict).__name__}")
    if isinstance(verdict, MicroVerdict) and (fault := inconsistency(verdict)) is not None:
        raise ValueError(f"this verdict of {verdict.fusion} does not follow from its samples: {fault}")
    kind = str(verdict.__struct_config__.tag)
    date = moment(verdict).strftime("%Y%m%dT%H%M%S")
    name = "-".join((kind, _slug(subject(verdict)), _slug(case(verdict)), date))
    home = folder / _slug(verdict.environment.gpu or "cpu")
    for number in itertools.count(1):
        path = home / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            records.write(verdict, path)
        except FileExistsError as error:  # two GPUs of one host judge the same case at the same time
            if _holds(path, verdict):
                message = f"{path} exists; records are never overwritten: measure again for a new one"
                raise FileExistsError(message) from error
        else:
            return path
    raise AssertionError("numbers do not end")


def subject(verdict: Verdict) -> str:
    """What was judged: the fusion of a micro verdict, the stack of a gate verdict."""
    return verdict.fusion if isinstance(verdict, MicroVerdict) else verdict.stack


def case(verdict: Verdict) -> str:
    """At what it was judged: the case of a micro verdict, the protocol of a gate verdict."""
    return verdict.case.name if isinstance(verdict, MicroVerdict) else verdict.protocol


def moment(verdict: Verdict) -> datetime:
    """When it was measured; a time without a zone is UTC. Raises ValueError where it is not an ISO 8601 time."""
    try:
        measured = datetime.fromisoformat(verdict.measured_at.replace("Z", "+00:00"))  # 3.10 does not read "Z"
        return measured.astimezone(timezone.utc) if measured.tzinfo else measured.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError) as error:  # beyond the years 1 to 9999 in UTC
        raise ValueError(f"measured_at is not an ISO 8601 time: {verdict.measured_at!r}") from error


@functools.lru_cache(maxsize=4096)
def _read_checked(path: Path, mtime_ns: int, size: int) -> tuple[Verdict, str | None]:
    """A file's verdict, and what in it does not follow from its samples; read again when the file changes."""
    verdict = read(path)
    return verdict, inconsistency(verdict) if isinstance(verdict, MicroVerdict) else None


def _holds(path: Path, verdict: Verdict) -> bool:
    """Whether a file holds that verdict; compared as records, since JSON reads 0 back as 0.0."""
    try:
        return records.read(path) == verdict
    except ValueError:  # another process has just made it, or it is broken
        return False


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-.") or "unnamed"


def _warn(message: str) -> None:
    warnings.warn(message, LedgerWarning, stacklevel=3)
