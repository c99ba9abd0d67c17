"""The Kokoro driver: upstream's KModel with real weights, spoken from phonemes."""

from __future__ import annotations

import functools
import io
import math
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from voxfuse.e2e.stack import Speech, Text, Workload
from voxfuse.e2e.stacks._seed import seeded
from voxfuse.e2e.weights.cache import WeightsCorrupt
from voxfuse.e2e.weights.kokoro import REPOSITORY, KokoroFiles, find
from voxfuse.patches._kokoro_import import load_kokoro
from voxfuse.profiles.capture import Stage

MAX_PHONEMES = 510


class KokoroStack:
    """Speaks with Kokoro-82M v1.0 on one device, one text at a time.

    ``voice`` names a voice of the weights (embedded: jf_alpha, jf_gongitsune, jf_nezumi, jf_tebukuro, jm_kumo);
    ``speed`` divides the durations; with ``timed`` each call synchronises the device around the stages and reports
    their seconds, without it no synchronisation is added and ``Speech.stages`` is empty. Raises ValueError for a speed
    that is not a positive finite number and a voice that is not a
    plain name.
    """

    name = "kokoro"
    distribution = "kokoro"
    sample_rate = 24_000
    workload = Workload(streaming=False, concurrency=False, reference_audio=False, languages=("en",))
    stages = (
        Stage("text", "tokenizer"),  # ALBERT, durations, F0 and energy, text encoder
        Stage("decoder", "vocoder", "decoder"),
        Stage("generator", "vocoder", "decoder.generator"),
    )

    def __init__(self, voice: str = "jm_kumo", speed: float = 1.0, timed: bool = False) -> None:
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"speed must be a positive number (1 is the voice's own pace), got {speed}")
        if not re.fullmatch(r"\w+", voice):
            raise ValueError(f"voice must be a name such as jm_kumo, got {voice!r}")
        self.voice = voice
        self.speed = speed
        self.timed = timed
        self._model: Any = None
        self._styles: Any = None
        self._weights = ""

    @property
    def model(self) -> torch.nn.Module:
        """The loaded ``kokoro.model.KModel``. Raises RuntimeError before ``load``."""
        if self._model is None:
            raise RuntimeError("no model is loaded: call load(device) first")
        return self._model

    @property
    def weights(self) -> str:
        """Where checkpoint and voice come from, each with its SHA-256; empty before ``load``."""
        return self._weights

    def load(self, device: str, model_dir: Path | None = None) -> None:
        """Load KModel and the voice onto a device, from the sources that ``weights.kokoro.find`` describes.

        Raises WeightsMissing where no weights can be had, its subclass WeightsCorrupt where some are damaged or do not
        fit the model, and ImportError where kokoro is not installed.
        """
        load_kokoro()
        files = find(self.voice, model_dir)
        model = _build(files)
        self._model = model.to(device).eval()
        self._styles = files.styles.to(device)
        self._weights = files.source

    def synthesize(self, text: Text, seed: int) -> Speech:
        """Speak one text; global random state is left as it was.

        ``stages`` has ``text`` (ALBERT, durations, F0 and energy, text encoder) and ``decoder`` (and generator), in
        seconds, where the driver is timed. Raises ValueError for a text without phonemes, or of
        more than 510; phonemes that are not in the model's alphabet are left out with a warning, as upstream does
        silently.
        """
        model: Any = self.model
        phonemes = _phonemes(text, model.vocab)
        style = self._styles[len(phonemes) - 1]  # upstream's choice: by the length of the string
        with seeded(seed, model.device), _stages(model, self.timed) as stages:
            audio = model(phonemes, style, self.speed)
        return Speech(audio.reshape(-1).numpy(), stages)


def phonemize(text: str) -> str:
    """American English text to Kokoro's phonemes, by the G2P of hibari-tts, whose voices are not loaded.

    Raises ImportError, naming the package, where hibari-tts is not installed.
    """
    try:
        from hibari import Hibari
    except ImportError as error:
        raise ImportError(
            f"speaking a text without phonemes needs a G2P ({error}): pip install hibari-tts, or give phonemes"
        ) from error
    g2p = _g2p()
    return " ".join(g2p(sentence) for sentence in Hibari.split_sentences(text))


@functools.cache
def _g2p() -> Callable[[str], str]:
    from hibari.g2p import G2P  # reads its lexicons: about half a second

    return G2P()


def _phonemes(text: Text, vocabulary: dict[str, int]) -> str:
    phonemes = phonemize(text.text) if text.phonemes is None else text.phonemes
    unknown = set(phonemes) - vocabulary.keys()
    if unknown == set(phonemes):
        raise ValueError(f"text {text.id}: nothing to speak in the phonemes {phonemes!r}")
    if len(phonemes) > MAX_PHONEMES:
        raise ValueError(
            f"text {text.id}: {len(phonemes)} phonemes, the model takes at most {MAX_PHONEMES}: split it into sentences"
        )
    if unknown:
        listed = " ".join(sorted(unknown))
        warnings.warn(f"text {text.id}: not in Kokoro's alphabet, left out: {listed}", stacklevel=3)
    return phonemes


def _build(files: KokoroFiles) -> Any:
    """KModel by its own constructor, then a check that every tensor arrived: a failed load goes unnoticed upstream."""
    from kokoro.model import KModel

    checkpoint: Any = files.checkpoint
    stored = _read_checkpoint(checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.nn.utils.weight_norm.* is deprecated")
        warnings.filterwarnings("ignore", message="dropout option adds dropout after all but last")
        model = KModel(repo_id=REPOSITORY, config=files.config, model=checkpoint)
    verify(model.state_dict(), stored)
    return model


def _read_checkpoint(checkpoint: Path | io.BytesIO) -> dict[str, torch.Tensor]:
    """The tensors by KModel's names; a file in memory is left at its start."""
    try:
        stored = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if isinstance(checkpoint, io.BytesIO):
            checkpoint.seek(0)
        return {
            f"{submodule}.{name.removeprefix('module.')}": tensor
            for submodule, tensors in stored.items()
            for name, tensor in tensors.items()
        }
    except (RuntimeError, ValueError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise WeightsCorrupt(f"{checkpoint} is not a checkpoint of Kokoro: {error}") from error


def verify(loaded: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    """Check that a model holds exactly what the checkpoint holds.

    The affine of AdaIN's instance norms may be absent from the checkpoint, since it was never trained, and ALBERT's
    ``position_ids``, which older transformers saved, from the model. Raises WeightsCorrupt, naming tensors, otherwise.
    """
    missing = [name for name in loaded.keys() - stored.keys() if ".norm." not in name]
    surplus = [name for name in stored.keys() - loaded.keys() if not name.endswith(".position_ids")]
    different = [name for name in loaded.keys() & stored.keys() if not torch.equal(loaded[name], stored[name])]
    for problem, names in (("absent from", missing), ("unknown to the model but in", surplus), ("unlike", different)):
        if names:
            raise WeightsCorrupt(
                f"KModel did not load its weights: {len(names)} tensors are {problem} the checkpoint, "
                f"such as {sorted(names)[0]}; is it kokoro-v1_0.pth for this release of kokoro?"
            )


@contextmanager
def _stages(model: Any, timed: bool) -> Iterator[dict[str, float]]:
    """Seconds per stage, filled in when the block ends; nothing is hooked or synchronised unless timed.

    The decoder is bounded by its forward hooks; text is everything before. Nothing inside of the decoder is hooked: a
    captured decoder would not run it.
    """
    stages: dict[str, float] = {}
    if not timed:
        yield stages
        return
    device = model.device
    marks: dict[str, float] = {}

    def mark(name: str) -> Any:
        def hook(*_: Any) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            marks[name] = time.perf_counter()

        return hook

    hooks = [
        model.decoder.register_forward_pre_hook(mark("decoder")),
        model.decoder.register_forward_hook(mark("decoder end")),
    ]
    try:
        mark("start")()
        yield stages
    finally:
        for hook in hooks:
            hook.remove()
    stages["text"] = marks["decoder"] - marks["start"]
    stages["decoder"] = marks["decoder end"] - marks["decoder"]
