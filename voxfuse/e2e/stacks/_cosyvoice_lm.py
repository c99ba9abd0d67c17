"""CosyVoice2's language model as a stage of its driver: text to speech tokens, by upstream's own loop.

Weights are those of a model folder as upstream releases it (``llm.pt`` and ``CosyVoice-BlankEN``), or random ones of
the released shapes, whose lengths have to be forced: they know no end.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.stacks._speech_tokens import SpeechTokens
from voxfuse.e2e.weights.cache import WeightsCorrupt
from voxfuse.patches import _decoding
from voxfuse.patches._cosyvoice_lm import COMMON, load_language_model
from voxfuse.profiles.capture import Stage

STAGE = Stage("lm", "AR")
SPEECH_TOKENS = 6561
SAMPLING = {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1}  # cosyvoice2.yaml
SIZES: dict[str, Any] = {  # of CosyVoice-BlankEN, a Qwen2-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
NO_STOP = -20.0  # the bias of end and fill tokens that keeps random weights from drawing them


class CosyVoiceLM:
    """Qwen2LM on one device. ``sizes`` of the random model default to the released ones."""

    def __init__(self, sizes: dict[str, Any] | None = None, speech_tokens: int = SPEECH_TOKENS) -> None:
        self._sizes, self._speech_tokens = sizes or SIZES, speech_tokens
        self._model: Any = None
        self._tokenizer: Any = None
        self.weights = ""

    @property
    def model(self) -> torch.nn.Module:
        """The loaded Qwen2LM: what ``apply_patches(model)`` takes. Raises RuntimeError before ``load``."""
        if self._model is None:
            raise RuntimeError("no model is loaded: call load(device) first")
        return self._model  # type: ignore[no-any-return]

    def load(self, device: str, model_dir: Path | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Load the model; without a folder, one of random weights.

        Raises ImportError where cosyvoice is absent or this transformers is one with which upstream speaks noise,
        WeightsMissing where the folder lacks a file, WeightsCorrupt where the weights do not fit.
        """
        module = load_language_model()
        if _decoding.pads_short_masks():
            import transformers

            raise ImportError(
                f"CosyVoice's language model needs transformers before 4.53, here is {transformers.__version__}: newer "
                "ones hide all but the first key from its steps (QwenAudio/CosyVoice#1446); pip install "
                "transformers==4.51.3"
            )
        sampling = functools.partial(sys.modules[COMMON].ras_sampling, **SAMPLING)
        if model_dir is None:
            self._model = synthetic(module, self._sizes, self._speech_tokens, sampling, device)
            self.weights = "random weights of the released shapes"
        else:
            self._model, self._tokenizer = _released(module, model_dir, sampling)
            self.weights = f"{model_dir / 'llm.pt'}"
        self._model = self._model.to(device, dtype).eval()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text: by the folder's tokenizer, or its bytes where the weights are random."""
        if self._tokenizer is None:
            vocabulary = self._model.llm.model.config.vocab_size
            return [byte % vocabulary for byte in text.encode()]
        return list(self._tokenizer(text).input_ids)

    def stream(
        self,
        text: Sequence[int],
        seed: int,
        prompt_text: Sequence[int] = (),
        prompt_speech: Sequence[int] = (),
        count: int | None = None,
    ) -> Iterator[int]:
        """Speech tokens one by one as upstream yields them, ``count`` of them where it is given.

        The random stream is seeded for the process when the first token is asked for, and goes on with it: one stream
        at a time repeats itself.
        """
        if not text or (count is not None and count < 1):
            raise ValueError(f"expected a text and at least one token, got {len(text)} ids and count {count}")
        device = self._model.llm_decoder.weight.device
        ids = [torch.tensor([list(part)], dtype=torch.int64, device=device) for part in (text, prompt_text)]
        speech = torch.tensor([list(prompt_speech)], dtype=torch.int64, device=device)
        lengths = [torch.tensor([part.shape[1]], dtype=torch.int32, device=device) for part in (*ids, speech)]
        ratio = None if count is None else (count + 0.5) / len(text)  # upstream rounds ratio · length down
        forced = {} if ratio is None else {"max_token_text_ratio": ratio, "min_token_text_ratio": ratio}
        torch.manual_seed(seed)
        yield from self._model.inference(
            ids[0], lengths[0], ids[1], lengths[1], speech, lengths[2], torch.zeros(0, 192, device=device), **forced
        )

    def speak(self, text: Sequence[int], seed: int, **options: Any) -> SpeechTokens:
        """All of ``stream``, timed; upstream's loop waits for the device at every token, so nothing is synchronised
        beside. Global random state is left as it was."""
        (spoken,) = self.speak_at_once([text], seed, **options)
        return spoken

    def speak_at_once(self, texts: Sequence[Sequence[int]], seed: int, **options: Any) -> list[SpeechTokens]:
        """Several requests at once, each in a thread of its own as upstream serves them.

        They share the random stream: more than one repeat themselves under greedy sampling only.
        """
        device = self._model.llm_decoder.weight.device
        begin = time.perf_counter()

        def serve(text: Sequence[int]) -> SpeechTokens:
            spoken = SpeechTokens([], [])
            for token in self.stream(text, seed, **options):
                spoken.tokens.append(token)
                spoken.after_s.append(time.perf_counter() - begin)
            return spoken

        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            ThreadPoolExecutor(max_workers=len(texts)) as threads,
        ):
            return list(threads.map(serve, texts))


def synthetic(module: Any, sizes: dict[str, Any], speech_tokens: int, sampling: Any, device: str = "cpu") -> Any:
    """A Qwen2LM of random weights that draws no end and no fill token. ``module``: cosyvoice.llm.llm."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**sizes)
    config._attn_implementation = "sdpa"
    encoder = module.Qwen2Encoder.__new__(module.Qwen2Encoder)
    torch.nn.Module.__init__(encoder)  # its constructor reads a folder
    with torch.random.fork_rng(devices=[device] if device != "cpu" else []), torch.device(device):
        torch.manual_seed(0)
        encoder.model = Qwen2ForCausalLM(config)
        model = module.Qwen2LM(config.hidden_size, config.hidden_size, speech_tokens, encoder, sampling)
        with torch.no_grad():
            model.llm_decoder.bias[speech_tokens:] = NO_STOP
    return model


def _released(module: Any, model_dir: Path, sampling: Any) -> tuple[Any, Any]:
    """Qwen2LM and its tokenizer from a folder of upstream's."""
    from transformers import AutoTokenizer

    blank, checkpoint = model_dir / "CosyVoice-BlankEN", model_dir / "llm.pt"
    for path in (blank / "config.json", checkpoint):
        if not path.is_file():
            raise WeightsMissing(f"{path} is absent: expected a folder of CosyVoice2-0.5B as upstream releases it")
    encoder = module.Qwen2Encoder(str(blank))
    hidden = encoder.model.config.hidden_size
    model = module.Qwen2LM(hidden, hidden, SPEECH_TOKENS, encoder, sampling)
    try:
        model.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))
    except (RuntimeError, ValueError, EOFError) as error:
        raise WeightsCorrupt(f"{checkpoint} is no language model of CosyVoice2: {error}") from error
    return model, AutoTokenizer.from_pretrained(str(blank))
