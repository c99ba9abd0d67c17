"""Reading a Chrome trace piece by piece: its events as small structs, in bounded memory.

A trace is ``{…, "traceEvents": [EVENT, …], …}`` or the list alone, plain or gzipped, as torch.profiler and what builds
on it write it. Chunks are cut between two events; a cut is right if and only if what lies before it is whole JSON.
Whatever the file holds, the outcome is events or a TraceError that says where the file is at fault.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

CHUNK_BYTES = 4 << 20
LONGEST_BYTES = 64 << 20  # of one event, of what lies before the events or behind them
MOST_BYTES = 8 << 30  # of a whole trace, unpacked
CUTS_TRIED = 24  # places per chunk that look like the end of an event
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENTS = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')


Integer = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class TraceError(ValueError):
    """The file is not a trace that can be analysed; the message says what was expected and what to do."""


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that the analysis uses; shapes stay JSON until they are needed."""

    correlation: Integer | None = None
    stream: Integer | None = None
    device: Integer | None = None
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b""))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b""))
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=msgspec.Raw(b""))
    name: str | None = None  # of a process or thread


class Event(msgspec.Struct, gc=False):
    """One event; ``ts`` and ``dur`` are µs."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Integer | str | None = None
    tid: Integer | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = None


_whole = msgspec.json.Decoder(list[Event])
_parts = msgspec.json.Decoder(list[msgspec.Raw])
_lenient = msgspec.json.Decoder(Event, strict=False)


class Unreadable:
    """How many events had fields of another type than torch writes, and were left out."""

    def __init__(self) -> None:
        self.count = 0


def read_events(path: Path, unreadable: Unreadable) -> Iterator[list[Event]]:
    """The events of a trace, a few thousand at a time. Raises TraceError, OSError."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else path.open("rb") as source:
            yield from _read(path, source, unreadable)  # type: ignore[arg-type]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: the gzip file is broken ({error}): the profiler was still writing, or the copy was cut short"
        ) from error


def _read(path: Path, source: BinaryIO, unreadable: Unreadable) -> Iterator[list[Event]]:
    buffer, taken, bare = _header(path, source)
    while chunk := source.read(CHUNK_BYTES):
        taken += len(chunk)
        if taken > MOST_BYTES:
            raise TraceError(f"{path}: more than {MOST_BYTES >> 30} GiB unpacked; profile a shorter window")
        buffer += chunk
        cut = _cut(buffer, unreadable)
        if cut is not None:
            events, buffer = cut
            yield events
        elif len(buffer) > LONGEST_BYTES:
            raise TraceError(
                f"{path}: no end of an event within {LONGEST_BYTES >> 20} MiB at byte {taken - len(buffer)}: "
                "this is no trace of torch.profiler, or names in it are not quoted right"
            )
    yield _last(path, buffer, taken - len(buffer), bare, unreadable)


def _header(path: Path, source: BinaryIO) -> tuple[bytes, int, bool]:
    """What follows the bracket that opens the events, the bytes read so far, and whether the list is all there is."""
    head = b""
    while chunk := source.read(CHUNK_BYTES):
        head += chunk
        if head.lstrip()[:1] == b"[":
            return head.lstrip()[1:], len(head), True
        for found in _EVENTS.finditer(head):
            try:
                msgspec.json.decode(head[: found.end()] + b"]}", type=dict[str, msgspec.Raw])
            except (msgspec.DecodeError, RecursionError):
                continue
            return head[found.end() :], len(head), False
        if len(head) > LONGEST_BYTES:
            break
    raise TraceError(
        f"{path}: no list traceEvents; expected a Chrome trace as torch.profiler's export_chrome_trace writes it "
        "(.json or .json.gz)"
    )


def _cut(buffer: bytes, unreadable: Unreadable) -> tuple[list[Event], bytes] | None:
    """The whole events of a buffer and what is left of it, or None where no event is whole."""
    tried = 0
    for window in (64 << 10, 1 << 20, len(buffer)):
        places = [found.start() + 1 for found in _BETWEEN.finditer(buffer, max(0, len(buffer) - window))]
        for place in reversed(places[-CUTS_TRIED:]):
            tried += 1
            if tried > CUTS_TRIED:
                return None
            events = _decode(buffer[:place], unreadable)
            if events is not None:
                return events, buffer[buffer.index(b"{", place) :]
    return None


def _decode(events: bytes, unreadable: Unreadable) -> list[Event] | None:
    """Events separated by commas, or None where this is not JSON."""
    data = b"[" + events + b"]"
    try:
        return _whole.decode(data)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, RecursionError):
        return None
    try:
        parts = _parts.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    readable = []
    for part in parts:
        try:
            readable.append(_lenient.decode(part))
        except (msgspec.DecodeError, RecursionError):
            unreadable.count += 1
    return readable


def _last(path: Path, rest: bytes, offset: int, bare: bool, unreadable: Unreadable) -> list[Event]:
    """The last events, and a look at whether the file ends as a trace should."""
    text = "[" + rest.decode("latin-1")  # one character per byte, so that places in it are places in the file
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        if not bare:
            json.loads('{"":0' + text[end:])
    except json.JSONDecodeError as error:
        broken_off = error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip()) - 1
        what = "it breaks off there: the profiler was still writing, or the copy was cut short" if broken_off else error
        raise TraceError(f"{path}: not a whole trace after byte {offset}: {what}") from error
    except (RecursionError, ValueError) as error:
        raise TraceError(f"{path}: not a trace after byte {offset}: {error}") from error
    if bare and text[end:].strip():
        raise TraceError(f"{path}: something follows the list of events at byte {offset + end - 1}")
    events = _decode(rest[: end - 2], unreadable)
    if events is None:
        raise TraceError(f"{path}: the events after byte {offset} are not UTF-8 JSON")
    return events
