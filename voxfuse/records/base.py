"""What every record is built on: immutable structs, and documents with a schema version."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA_VERSION = 1

Contract = Literal["bitwise", "same-precision", "reduced"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything below: immutable, keyword-only, strict about unknown fields."""


class Document(Record, frozen=True, kw_only=True, tag_field="record"):
    """A record that is written to a file of its own; ``record`` names its type."""

    schema: int = SCHEMA_VERSION


class Environment(Record, frozen=True, kw_only=True):
    """Where something was measured. ``gpu`` fields are None on a machine without a GPU."""

    gpu: str | None
    gpu_uuid_sha256: str | None
    compute_capability: str | None
    driver: str | None
    torch: str
    triton: str | None
    python: str
    platform: str
    voxfuse: str
    commit: str | None
    packages: dict[str, str] = {}


class TensorSignature(Record, frozen=True, kw_only=True):
    """Shape and strides in elements; dtype as torch prints it without the ``torch.`` prefix."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
