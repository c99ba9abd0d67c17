"""One thing that the doctor looked at."""

from __future__ import annotations

from typing import Literal

from voxfuse.records import Record

State = Literal["ok", "note", "problem"]


class Finding(Record, frozen=True, kw_only=True):
    """One thing looked at; ``advice`` says what to do where ``state`` is not ``ok``."""

    subject: str
    value: str
    state: State = "ok"
    advice: str = ""
