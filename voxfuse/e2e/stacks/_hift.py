"""The vocoder stage of the stacks with HiFT: mel spectrogram to waveform, by upstream's ``inference``.

With a checkpoint the spectrograms are those of real speech (Kokoro's, by its own driver), so what is heard has words;
without one the weights are random and so is the speech: then the samples are judged against an fp64 oracle.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxfuse.e2e.stack import Speech, Text, WeightsMissing, Workload
from voxfuse.e2e.stacks import _mel
from voxfuse.e2e.stacks._seed import seeded
from voxfuse.e2e.stacks.kokoro import KokoroStack
from voxfuse.e2e.weights.cache import WeightsCorrupt, file_sha256
from voxfuse.profiles.capture import Stage

SYNTHETIC = "synthetic weights"  # why nothing is transcribed
SEED, VOICED_HZ = 0, 150.0
RELEASED: dict[str, Any] = {
    "sampling_rate": 24_000,
    "nb_harmonics": 8,
    "upsample_rates": [8, 5, 3],
    "upsample_kernel_sizes": [16, 11, 7],
    "istft_params": {"n_fft": 16, "hop_len": 4},
    "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5]] * 3,
    "source_resblock_kernel_sizes": [7, 7, 11],
    "source_resblock_dilation_sizes": [[1, 3, 5]] * 3,
}


class HiftStack(ABC):
    """Speaks through one HiFT on one device, one text at a time. ``width``: channels behind conv_pre and within the f0
    predictor; the released ones unless given. With ``timed`` each call synchronises the device around the vocoder."""

    name: str
    distribution: str
    highest_hz: float  # upper end of the mel bands
    files: tuple[str, ...]  # of a checkpoint, the first that is there
    sample_rate = 24_000
    workload = Workload(streaming=False, concurrency=False, reference_audio=False, languages=("en",))
    stages = (Stage("vocoder", "vocoder"),)

    def __init__(self, timed: bool = False, width: int = 512) -> None:
        self.timed, self._width = timed, width
        self._model: Any = None
        self._double: Any = None
        self._speaker: KokoroStack | None = None
        self._weights = ""
        self._heard: tuple[torch.Tensor, torch.Tensor] | None = None  # mel and source of the last text

    @abstractmethod
    def _classes(self) -> tuple[Any, Any]:
        """The generator's and the f0 predictor's class. Raises ImportError where they are nowhere."""

    @abstractmethod
    def _of_hift(self, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the vocoder in a checkpoint, by the names of its modules."""

    @property
    def model(self) -> torch.nn.Module:
        """The loaded generator. Raises RuntimeError before ``load``."""
        if self._model is None:
            raise RuntimeError("no model is loaded: call load(device) first")
        return self._model

    @property
    def weights(self) -> str:
        """The checkpoint with its SHA-256, or which random weights; empty before ``load``."""
        return self._weights

    @property
    def unintelligible(self) -> str | None:
        """Why no words can be heard, or None."""
        return None if self._speaker else SYNTHETIC

    def load(self, device: str, model_dir: Path | None = None) -> None:
        """The generator at the released shapes, with the checkpoint of a folder or, without one, random weights.

        Raises WeightsMissing where the folder has no checkpoint, or Kokoro (whose speech it is to say) no weights;
        WeightsCorrupt where the checkpoint does not fit, and ImportError where the stack is not installed.
        """
        generator, predictor = self._classes()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)  # of random weights, and of a causal source's noise
            f0 = predictor(num_class=1, in_channels=_mel.BANDS, cond_channels=self._width)
            model = generator(in_channels=_mel.BANDS, base_channels=self._width, **RELEASED, f0_predictor=f0)
            if model_dir is None:
                _randomise(model)
        if model_dir is None:
            self._speaker, self._weights = None, f"random weights (seed {SEED}) at the released shapes"
        else:
            self._weights = self._read(model, model_dir)
            self._speaker = KokoroStack()
            self._speaker.load(device)
        self._model, self._double = model.to(device).eval(), None

    def _read(self, model: torch.nn.Module, model_dir: Path) -> str:
        path = next((model_dir / name for name in self.files if (model_dir / name).is_file()), None)
        if path is None:
            raise WeightsMissing(f"{model_dir} has no {' and no '.join(self.files)}: expected {self.name}'s release")
        try:
            if path.suffix == ".safetensors":
                from safetensors.torch import load_file

                stored = load_file(path)
            else:
                stored = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(self._of_hift(stored), strict=True)
        except (RuntimeError, ValueError, EOFError, AttributeError, KeyError) as error:
            raise WeightsCorrupt(f"{path} is not the vocoder of {self.name}: {error}") from error
        return f"{model_dir.name}/{path.name} sha256:{file_sha256(path)}"

    @torch.inference_mode()
    def synthesize(self, text: Text, seed: int) -> Speech:
        """Say one text; global random state is left as it was. ``stages`` has ``vocoder`` where the driver is timed."""
        model: Any = self.model
        device = model.conv_post.bias.device
        mel = self.features(text).to(device)
        with seeded(seed, device):
            begin = self._now(device)
            audio, source = model.inference(speech_feat=mel)
            vocoder_s = self._now(device) - begin
        self._heard = mel, source
        return Speech(audio.reshape(-1).cpu().numpy(), {"vocoder": vocoder_s} if self.timed else {})

    def features(self, text: Text) -> torch.Tensor:
        """The mel spectrogram [1, 80, frames] of a text: of Kokoro's speech with real weights, else made up."""
        if self._speaker is None:
            return _mel.made_up(text.text)
        speech = self._speaker.synthesize(text, SEED)
        return _mel.log_mel(torch.from_numpy(speech.audio)[None], self.highest_hz)

    def oracle(self) -> np.ndarray:
        """What ``decode`` makes in fp64 of the last text's spectrogram and source, float64 [samples].

        The source is that of the last call itself, whichever code made it: a phase apart in f0 would hide all else.
        Raises RuntimeError where nothing was spoken.
        """
        if self._heard is None:
            raise RuntimeError("nothing was spoken yet: call synthesize first")
        if self._double is None:
            self._double = _double(self.model)
        mel, source = (tensor.double() for tensor in self._heard)
        with torch.inference_mode():
            return self._double.decode(x=mel, s=source).reshape(-1).cpu().numpy()

    def _now(self, device: torch.device) -> float:
        if self.timed and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def _double(model: Any) -> Any:
    """The generator in fp64, without what comes before ``decode``."""
    apart = {name: getattr(model, name) for name in ("f0_predictor", "m_source")}
    double = copy.deepcopy(model, {id(part): torch.nn.Identity() for part in apart.values()}).double()
    double.stft_window = double.stft_window.double()
    return double


def _randomise(model: torch.nn.Module) -> None:
    """Parameters whose initial values would hide a mistake, and voiced frames."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha"):
                parameter.uniform_(0.3, 3)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
        predictor: Any = model.f0_predictor
        predictor.classifier.bias.fill_(VOICED_HZ)
