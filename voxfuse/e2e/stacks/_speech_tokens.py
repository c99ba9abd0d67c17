"""What a language model stage gives: speech tokens, and when each of them was there."""

from __future__ import annotations

from typing import NamedTuple

CHUNK = 25  # speech tokens of a second, and of CosyVoice's first chunk


class SpeechTokens(NamedTuple):
    """Speech tokens, and the seconds from the request to each of them."""

    tokens: list[int]
    after_s: list[float]

    @property
    def first_chunk_s(self) -> float:
        """Seconds to the first 25 tokens, or to all of fewer: when the vocoder can begin."""
        return self.after_s[min(CHUNK, len(self.after_s)) - 1]

    @property
    def stages(self) -> dict[str, float]:
        """Seconds of the prefill with the first token, and of the others."""
        return {"lm prefill": self.after_s[0], "lm decode": self.after_s[-1] - self.after_s[0]}
