"""Word error rate: Whisper's English normaliser on both sides, edit counts from jiwer."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

NORMALIZER_PACKAGE = "whisper_normalizer"
NORMALIZER_FILES = ("english.py", "basic.py", "normalizers/english.json")
INSTALL = "pip install 'voxfuse[gate]'"


class Edits(NamedTuple):
    """Substitutions + deletions + insertions, and the words of the reference, both after normalising."""

    edits: int
    words: int


def missing_package(error: ImportError) -> ImportError:
    """The ImportError to raise where a package of the extra 'gate' is absent."""
    return ImportError(f"the gate needs {error.name}: {INSTALL}", name=error.name)


@functools.cache
def normalizer() -> Callable[[str], str]:
    """Whisper's English normaliser. Raises ImportError, with what to install, where it is absent."""
    try:
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError as error:
        raise missing_package(error) from error
    return EnglishTextNormalizer()


def normalizer_sha256() -> str:
    """SHA-256 over the normaliser's package version and the sources and data that decide what it does."""
    spec = importlib.util.find_spec(NORMALIZER_PACKAGE)
    if spec is None or spec.origin is None:
        raise missing_package(ImportError(name=NORMALIZER_PACKAGE))
    digest = hashlib.sha256(importlib.metadata.version(NORMALIZER_PACKAGE).encode())
    for name in NORMALIZER_FILES:
        digest.update((Path(spec.origin).parent / name).read_bytes())
    return digest.hexdigest()


def count_edits(reference: str, hypothesis: str | None) -> Edits:
    """Word edits of one utterance. ``None`` (no transcript) counts every word of the reference as deleted."""
    normalise = normalizer()
    expected = normalise(reference).split()
    if hypothesis is None:
        return Edits(len(expected), len(expected))
    heard = normalise(hypothesis).split()
    if not expected or not heard:
        return Edits(len(expected) + len(heard), len(expected))
    try:
        import jiwer
    except ImportError as error:
        raise missing_package(error) from error
    counts = jiwer.process_words(" ".join(expected), " ".join(heard))
    return Edits(counts.substitutions + counts.deletions + counts.insertions, len(expected))


def corpus_wer(counts: Sequence[Edits]) -> float:
    """Edits over words of the whole set: each edit counts once. Raises ValueError where there are no words."""
    words = sum(count.words for count in counts)
    if words == 0:
        raise ValueError("corpus WER needs at least one reference word, got none")
    return sum(count.edits for count in counts) / words


def macro_wer(counts: Sequence[Edits]) -> float:
    """Mean of the utterances' own WER, each capped at 1; utterances without words are left out."""
    rates = [min(1.0, count.edits / count.words) for count in counts if count.words]
    if not rates:
        raise ValueError("macro WER needs at least one reference word, got none")
    return sum(rates) / len(rates)
