"""A small stack that makes tones, patch sets for it, and a transcriber that reads the tones back: the gate, in
milliseconds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import soundfile
import torch

from voxfuse.e2e.asr import AudioUnreadable
from voxfuse.e2e.stack import Speech, Text, Workload
from voxfuse.records import Receipt

RATE_HZ = 8_000
WORD_S = 0.2
WORDS = ("red", "green", "blue", "white", "black", "brown", "pink", "grey")
TEXTS = tuple(
    Text(id=f"t{index:03d}", text=" ".join(WORDS[(index + step) % len(WORDS)] for step in range(9 + index % 3)))
    for index in range(40)
)


class Tones(torch.nn.Module):
    """Each word is a tone of its own frequency."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        time = torch.arange(int(RATE_HZ * WORD_S)) / RATE_HZ
        return (0.3 * torch.sin(2 * torch.pi * (300.0 + 100.0 * words[:, None]) * time)).flatten()


class ToneStack:
    """Speaks words as tones, with a little noise by seed."""

    name = "tones"
    distribution = "tones"
    sample_rate = RATE_HZ
    timed = False
    workload = Workload(streaming=False, concurrency=False, reference_audio=False, languages=("en",))
    weights = "none"

    def __init__(self) -> None:
        self.model = Tones()
        self.spoken: list[tuple[str, int]] = []
        self.breaks_at: int | None = None  # KeyboardInterrupt at that call

    def load(self, device: str, model_dir: Path | None = None) -> None:
        """Nothing to load."""

    def synthesize(self, text: Text, seed: int) -> Speech:
        if self.breaks_at is not None and len(self.spoken) == self.breaks_at:
            raise KeyboardInterrupt
        self.spoken.append((text.id, seed))
        words = torch.tensor([float(WORDS.index(word)) for word in text.text.split()])
        noise = 1e-3 * torch.randn(len(words) * int(RATE_HZ * WORD_S), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            audio = self.model(words) + noise
        return Speech(audio.numpy(), {"tones": 0.001} if self.timed else {})


class TonePatches:
    """Patches the tone model's forward on one stack; ``change`` maps untouched samples to patched ones."""

    def __init__(
        self,
        stack: ToneStack,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda audio: audio,
        *,
        falls_back: str | None = None,
        fires: bool = True,
        status: str = "applied",
    ) -> None:
        self._model = stack.model
        self._change, self._fires, self._status = change, fires, status
        self._falls_back = falls_back
        self._calls = 0
        self._on()

    def _on(self) -> None:
        upstream = type(self._model).forward

        def forward(words: torch.Tensor) -> torch.Tensor:
            self._calls += self._fires
            return self._change(upstream(self._model, words))

        self._model.forward = forward

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        return (
            Receipt(
                fusion="tone",
                stack="tones",
                target="Tones.forward",
                count=1,
                status=self._status,  # type: ignore[arg-type]
                reason="as asked" if self._status == "skipped" else None,
                calls=self._calls,
                fallbacks={self._falls_back: self._calls} if self._falls_back and self._calls else {},
                process_id=os.getpid(),
            ),
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        del self._model.forward
        try:
            yield
        finally:
            self._on()

    def revert(self) -> None:
        del self._model.forward


class ToneReader:
    """Hears each word by the frequency of its tone."""

    identity = "tone reader 1"

    def __init__(self) -> None:
        self.heard: list[str] = []

    def transcribe(self, path: Path) -> str:
        self.heard.append(path.stem)
        try:
            samples, rate = soundfile.read(path)
        except soundfile.LibsndfileError as error:
            raise AudioUnreadable(f"{path.name}: {error}") from error
        size = int(rate * WORD_S)
        words = []
        for start in range(0, len(samples) - size + 1, size):
            spectrum = np.abs(np.fft.rfft(samples[start : start + size]))
            index = round((np.argmax(spectrum) / WORD_S - 300) / 100)
            words.append(WORDS[index] if 0 <= index < len(WORDS) and spectrum.max() > 1 else "um")
        return " ".join(word for word in words if word != "um")
