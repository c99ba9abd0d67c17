"""The state of ``voxfuse judge``: a folder that an interrupted run goes on in, and that only the same run goes on in.

state.json      what the run is, which fusions it judges, and the gates that are done
records/        micro verdicts, as a ledger folder
gate-XXXXXXXX/  one run directory per gated set of fusions
profile/        what ``voxfuse profile`` wrote
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from voxfuse.fusions.registry import FUSIONS
from voxfuse.records import Environment, GateVerdict, Record, from_json

FILE = "state.json"
IDENTITY = ("stack", "stack_version", "device", "backend", "protocol_sha256", "pairs")
ENVIRONMENT = ("commit", "voxfuse", "torch", "triton", "gpu", "gpu_uuid_sha256")


class StateMismatch(RuntimeError):
    """The folder holds the state of another run, or something else; the message says what differs and what to do."""


class Content(Record, frozen=True, kw_only=True):
    """state.json. ``matched`` None: not profiled yet. ``gated``: outcome of each gated set by its key."""

    stack: str
    stack_version: str
    device: str
    backend: str
    protocol_sha256: str
    pairs: int
    environment: Environment
    matched: tuple[str, ...] | None = None
    note: str = ""
    gated: dict[str, str] = msgspec.field(default_factory=dict)


class State:
    """One run's state; every change is on disk before the next step begins."""

    def __init__(self, folder: Path, content: Content) -> None:
        self.folder = folder
        self.content = content

    @classmethod
    def open(cls, folder: Path, wanted: Content) -> State:
        """Start, or go on. Raises StateMismatch where the folder holds another run's state, or files of others."""
        path = folder / FILE
        if not path.exists():
            if folder.exists() and any(folder.iterdir()):
                raise StateMismatch(f"{folder} holds files but no {FILE}: choose another --state")
            state = cls(folder, wanted)
            state._save()
            return state
        try:
            there = msgspec.json.decode(path.read_bytes(), type=Content)
        except msgspec.DecodeError as error:
            raise StateMismatch(f"{path}: not the state of a judge run: {error}. Choose another --state") from error
        pairs = [(name, getattr(there, name), getattr(wanted, name)) for name in IDENTITY]
        here, then = wanted.environment, there.environment
        pairs += [(name, getattr(then, name), getattr(here, name)) for name in ENVIRONMENT]
        if differing := [f"{name} is {old!r} there, {new!r} here" for name, old, new in pairs if old != new]:
            raise StateMismatch(
                f"{folder} holds the state of another run: {'; '.join(differing)}. Choose another --state, or remove it"
            )
        if unknown := [name for name in there.matched or () if name not in FUSIONS]:
            raise StateMismatch(f"{path} names fusions that do not exist: {', '.join(unknown)}. Choose another --state")
        return cls(folder, there)

    def matched(self, fusions: tuple[str, ...], note: str) -> None:
        """Keep which fusions are judged, and why those."""
        self.content = msgspec.structs.replace(self.content, matched=fusions, note=note)
        self._save()

    def gate_folder(self, fusions: tuple[str, ...]) -> Path:
        """The run directory of a gated set."""
        return self.folder / f"gate-{gate_key(fusions)}"

    def gated(self, fusions: tuple[str, ...], verdict: GateVerdict) -> None:
        """Keep that a set was gated."""
        gated = {**self.content.gated, gate_key(fusions): verdict.verdict}
        self.content = msgspec.structs.replace(self.content, gated=gated)
        self._save()

    def verdict_of(self, fusions: tuple[str, ...]) -> GateVerdict | None:
        """The gate verdict of a set that was gated to the end, or None; one that cannot be read is made again."""
        path = self.gate_folder(fusions) / "verdict.json"
        if gate_key(fusions) not in self.content.gated or not path.is_file():
            return None
        try:
            return from_json(path.read_bytes(), GateVerdict)
        except ValueError:
            return None

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / (FILE + ".part")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.content), indent=1) + b"\n")
        partial.replace(self.folder / FILE)


def gate_key(fusions: tuple[str, ...]) -> str:
    """A short name of a set of fusions."""
    return hashlib.sha256("\n".join(sorted(fusions)).encode()).hexdigest()[:8]
