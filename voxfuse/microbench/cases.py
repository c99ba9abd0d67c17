"""The shapes at which fusions are judged: real shapes of real stacks, as data in ``cases/<stack>.json``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from voxfuse.records import Case, Record

FOLDER = Path(__file__).parent / "cases"


class JudgedCase(Record, frozen=True, kw_only=True):
    """A case and the fusion that is judged at it; ``calls`` is how often one run of the stack makes this call."""

    fusion: str
    case: Case
    calls: int


def stacks_with_cases() -> tuple[str, ...]:
    """The stacks that have cases."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_cases(stack: str) -> tuple[JudgedCase, ...]:
    """The cases of one stack. Raises KeyError, naming the stacks that have cases, for any other."""
    if stack not in stacks_with_cases():
        raise KeyError(f"no micro cases for stack {stack!r}; there are some for: {', '.join(stacks_with_cases())}")
    return msgspec.json.decode((FOLDER / f"{stack}.json").read_bytes(), type=tuple[JudgedCase, ...])
