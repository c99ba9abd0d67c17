"""Chatterbox's T3 as a stage of its driver: text to speech tokens, by upstream's own ``inference``.

Weights are those of a model folder as upstream releases it (``t3_cfg.safetensors``, ``tokenizer.json``, ``conds.pt``
with the voice), or random ones of the released shapes, whose lengths have to be forced.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.stacks import _hift_import
from voxfuse.e2e.stacks._seed import seeded
from voxfuse.e2e.stacks._speech_tokens import SpeechTokens
from voxfuse.e2e.weights.cache import WeightsCorrupt
from voxfuse.profiles.capture import Stage

STAGE = Stage("lm", "AR")
SIZES: dict[str, Any] = {  # Llama_520M
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
}
SPACE = "[SPACE]"  # in upstream's vocabulary
MOST_TOKENS = 1000  # upstream's


def load_t3() -> ModuleType:
    """Import ``chatterbox.models.t3.t3`` beside HiFT's modules, without einops, of which T3 calls nothing.

    Raises ImportError where chatterbox-tts or transformers is absent.
    """
    from transformers import GPT2Model, LlamaModel  # before a stand-in, at which transformers would look

    assert GPT2Model is not None and LlamaModel is not None
    _hift_import.chatterbox()
    absent = "einops" not in sys.modules and importlib.util.find_spec("einops") is None
    if absent:
        sys.modules["einops"] = ModuleType("einops")
        vars(sys.modules["einops"])["rearrange"] = None
    try:
        return importlib.import_module("chatterbox.models.t3.t3")
    finally:
        if absent:
            del sys.modules["einops"]


class ChatterboxT3:
    """T3 on one device. ``sizes`` of the random model default to the released ones."""

    def __init__(self, sizes: dict[str, Any] | None = None) -> None:
        self._sizes = sizes or SIZES
        self._module: Any = None
        self._model: Any = None
        self._condition: Any = None
        self._tokenizer: Any = None
        self.weights = ""

    @property
    def model(self) -> torch.nn.Module:
        """The loaded T3; ``apply_patches("chatterbox")`` serves it. Raises RuntimeError before ``load``."""
        if self._model is None:
            raise RuntimeError("no model is loaded: call load(device) first")
        return self._model  # type: ignore[no-any-return]

    def load(self, device: str, model_dir: Path | None = None) -> None:
        """Load the English model; without a folder, one of random weights, which has a voice of ones.

        Raises ImportError where chatterbox-tts is absent, WeightsMissing where the folder lacks a file, WeightsCorrupt
        where the weights do not fit.
        """
        self._module = load_t3()
        if model_dir is None:
            model = synthetic(self._module, self._sizes)
            speaker = torch.ones(1, model.hp.speaker_embed_size)
            self._condition = self._module.T3Cond(speaker_emb=speaker, emotion_adv=torch.full((1, 1, 1), 0.5))
            self.weights = "random weights of the released shapes"
        else:
            model, self._condition, self._tokenizer = _released(self._module, model_dir)
            self.weights = f"{model_dir / 't3_cfg.safetensors'}"
        self._model = model.to(device).eval()
        self._condition = self._condition.to(device=device)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text: by the folder's tokenizer, or its bytes below the start token where weights are random.

        Upstream's normalisation of punctuation is not applied.
        """
        if self._tokenizer is None:
            return [1 + byte % (self._model.hp.start_text_token - 1) for byte in text.encode()]
        return list(self._tokenizer.encode(text.replace(" ", SPACE)).ids)

    def speak(self, text: Sequence[int], seed: int, count: int | None = None) -> SpeechTokens:
        """Speech tokens with upstream's default settings, at most ``count``; global random state is left as it was.

        A token's time is when upstream embeds it for the next step: it has waited for the device then.
        """
        if not text or (count is not None and count < 1):
            raise ValueError(f"expected a text and at least one token, got {len(text)} ids and count {count}")
        model, settings = self._model, self._model.hp
        ids = torch.tensor([[settings.start_text_token, *text, settings.stop_text_token]] * 2, device=model.device)
        stamps: list[float] = []
        hook = model.speech_emb.register_forward_hook(lambda *_: stamps.append(time.perf_counter()))
        try:
            with seeded(seed, model.device):
                begin = time.perf_counter()
                rows = model.inference(t3_cond=self._condition, text_tokens=ids, max_new_tokens=count or MOST_TOKENS)
        finally:
            hook.remove()
        found = rows[0].tolist()
        tokens = found[:-1] if found[-1] == settings.stop_speech_token else found  # an end is not embedded
        return SpeechTokens(tokens, [stamp - begin for stamp in stamps[len(stamps) - len(tokens) :]])


def synthetic(module: Any, sizes: dict[str, Any], multilingual: bool = False) -> Any:
    """A T3 of random weights without a perceiver, that hardly ends by itself. ``module``: chatterbox.models.t3.t3."""
    configs = sys.modules["chatterbox.models.t3.llama_configs"].LLAMA_CONFIGS
    settings = module.T3Config.multilingual() if multilingual else module.T3Config.english_only()
    settings.llama_config_name, settings.use_perceiver_resampler = "voxfuse", False
    configs["voxfuse"] = configs["Llama_520M"] | sizes
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = module.T3(settings)
    finally:
        del configs["voxfuse"]
    with torch.no_grad():
        model.speech_head.weight[settings.stop_speech_token].zero_()
    return model


def _released(module: Any, model_dir: Path) -> tuple[Any, Any, Any]:
    """T3, the voice and the tokenizer of a folder of upstream's."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    checkpoint, tokenizer, voice = (model_dir / name for name in ("t3_cfg.safetensors", "tokenizer.json", "conds.pt"))
    for path in (checkpoint, tokenizer, voice):
        if not path.is_file():
            raise WeightsMissing(f"{path} is absent: expected a folder of Chatterbox as upstream releases it")
    model = module.T3(module.T3Config.english_only())
    try:
        model.load_state_dict(load_file(checkpoint))
        condition = module.T3Cond(**torch.load(voice, map_location="cpu", weights_only=True)["t3"])
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError) as error:
        raise WeightsCorrupt(f"{model_dir} holds no T3 of Chatterbox: {error}") from error
    return model, condition, Tokenizer.from_file(str(tokenizer))
