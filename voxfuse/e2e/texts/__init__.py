"""The English text set: sentences of our own, with Kokoro's phonemes, so that speaking them needs no G2P.

``english.jsonl`` has one text a line, ordered so that its first N are a mix of all kinds: plain sentences, texts of
one or two words, of more than thirty, numbers and names. ``scripts/make_texts.py`` makes the phonemes.
"""

from __future__ import annotations

from importlib.resources import files

import msgspec

from voxfuse.e2e.stack import Text


def load_texts(limit: int | None = None) -> list[Text]:
    """The first ``limit`` texts, or all. Raises ValueError for a limit below one or above their number."""
    lines = files(__name__).joinpath("english.jsonl").read_bytes().splitlines()
    if limit is not None and not 1 <= limit <= len(lines):
        raise ValueError(f"the English text set has {len(lines)} texts: asked for {limit}")
    return [msgspec.json.decode(line, type=Text) for line in lines[:limit]]
