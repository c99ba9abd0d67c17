"""CosyVoice2's language model: one-token steps from CUDA graphs, and ``ras_sampling`` in one kernel.

``inference``, ``inference_wrapper`` and ``inference_bistream`` stay upstream's, and with them order, early stop and
what is yielded. ``Qwen2Encoder.forward_one_step`` takes the place of the model's layers once a prefill has left a
cache; upstream's cache object stays whole (``fusions/decode_cache.py``). Hidden states of inner layers, which upstream
asks for and drops, are not computed. ``sampling_ids`` keeps the random stream of a GPU (``fusions/speech_sampler.py``).

With transformers 4.53 or newer upstream's own loop hides all but the first key from a new token, since its mask is of
one element (QwenAudio/CosyVoice#1446, #1886): its speech is noise there. Such steps are left as they are, and counted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from voxfuse.fusions.decode_graph import DECODE_GRAPH
from voxfuse.fusions.speech_sampler import RAS_SAMPLING, RasSampler
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches import _decoding
from voxfuse.patches._cosyvoice_import import use_checkout
from voxfuse.patches.layers import untouched
from voxfuse.patches.spec import Patch

LM = "cosyvoice.llm.llm"
COMMON = "cosyvoice.utils.common"
STEP = f"{LM}:Qwen2Encoder.forward_one_step"
SAMPLING_IDS = f"{LM}:TransformerLM.sampling_ids"
RAS, NUCLEUS, RANDOM = (f"{COMMON}:{name}_sampling" for name in ("ras", "nucleus", "random"))
TORCHAUDIO = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
MAX_TRIALS = 100  # upstream's
SETTINGS = ("top_p", "top_k", "win_size", "tau_r")


def _forward_one_step(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    steps = _decoding.decoding(run)

    def forward_one_step(self: Any, xs: torch.Tensor, masks: torch.Tensor, cache: Any = None) -> tuple[Any, Any]:
        if torch.compiler.is_compiling() or cache is None or xs.shape[1] != 1:
            return original(self, xs, masks, cache)  # type: ignore[no-any-return]
        reason = _foreign_model(self.model) or _masked(masks, cache)
        if reason is not None:
            steps.count(reason)
            return original(self, xs, masks, cache)  # type: ignore[no-any-return]
        hidden = steps.step(self.model.model, xs, cache)
        if isinstance(hidden, str):
            return original(self, xs, masks, cache)  # type: ignore[no-any-return]
        return hidden, cache

    return forward_one_step


def _foreign_model(model: Any) -> str | None:
    """Why the model around the decoder cannot be gone past, or None."""
    if type(model).__name__ != "Qwen2ForCausalLM":
        return f"the model is {type(model).__name__}, expected Qwen2ForCausalLM"
    return _decoding.bypassed(model) or _decoding.bypassed(model.model)


def _masked(masks: torch.Tensor, cache: Any) -> str | None:
    """Why the last row of ``masks`` [rows, ., tokens] hides keys from a new token, or None.

    Of a mask of one element, which can hide nothing but the token itself, only the size is asked: no wait for the
    device in upstream's main loop.
    """
    if masks.shape[-1] == 1 and not _decoding.pads_short_masks():
        return None
    if type(cache).__name__ != "DynamicCache":  # asked before its length
        return None
    return _decoding.masked(masks[:, -1, :], masks.shape[0], cache.get_seq_length() + 1)


def _sampling_ids(original: Callable[..., Any], run: Run, checkout: bool) -> Callable[..., Any]:
    held = threading.local()  # upstream starts a thread for each generation

    def sampling_ids(
        self: Any, weighted_scores: torch.Tensor, decoded_tokens: Sequence[int], sampling: int, ignore_eos: bool = True
    ) -> Any:
        settings = _settings(self.sampling)
        if isinstance(settings, str):
            TALLIES.add(run.receipt, fallback=settings)
            return original(self, weighted_scores, decoded_tokens, sampling, ignore_eos)
        if getattr(held, "settings", None) != settings:
            held.settings, held.sampler = settings, RasSampler(run, **settings, exclude=checkout)
        if checkout:
            if ignore_eos:
                weighted_scores[self.speech_token_size] = -torch.inf
            return held.sampler(weighted_scores, decoded_tokens)
        for _ in range(MAX_TRIALS + 1):
            token = held.sampler(weighted_scores, decoded_tokens)
            if not ignore_eos or token != self.speech_token_size:
                return torch.tensor([token])  # on the host, where upstream reads it
        raise RuntimeError(f"the end of speech was drawn {MAX_TRIALS + 1} times where it is not allowed")

    return sampling_ids


def _settings(sampling: Any) -> dict[str, Any] | str:
    """The settings of upstream's ras_sampling behind a model's ``sampling``, or why it is something else."""
    function, settings = sampling, {}
    if isinstance(sampling, functools.partial):
        function, settings = sampling.func, sampling.keywords
        if sampling.args:
            return "the sampling function has positional arguments bound"
    if function is not untouched(sys.modules[COMMON], "ras_sampling")[1]:
        return f"the sampling function is {getattr(function, '__qualname__', function)}, expected ras_sampling"
    if unknown := sorted(settings.keys() - set(SETTINGS)):
        return f"ras_sampling has settings that are not known: {', '.join(unknown)}"
    return dict(settings)


def load_language_model() -> ModuleType:
    """Import ``cosyvoice.llm.llm``, of the checkout where COSYVOICE_HOME names one.

    What upstream's import does beside is undone: it lets the root logger log everything. torchaudio, which it imports
    and never calls, need not be there. Raises ImportError where anything else is missing.
    """
    use_checkout()
    from transformers import Qwen2ForCausalLM  # before a stand-in, at which transformers would look

    assert Qwen2ForCausalLM is not None
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    absent = "torchaudio" not in sys.modules and importlib.util.find_spec("torchaudio") is None
    stand_ins = {name: ModuleType(name) for name in TORCHAUDIO} if absent else {}
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module(LM)
    finally:
        for name in stand_ins:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers


def _patches(checkout: bool) -> tuple[Patch, ...]:
    return (
        Patch(fusion=DECODE_GRAPH, target=STEP, absorbs=(STEP,), build=_forward_one_step),
        Patch(
            fusion=RAS_SAMPLING,
            target=SAMPLING_IDS,
            absorbs=(SAMPLING_IDS, RAS, NUCLEUS, RANDOM),
            build=functools.partial(_sampling_ids, checkout=checkout),
        ),
    )


PATCHES = _patches(checkout=False)  # of cosyvoice-minicpmo
SOURCES = {  # its 0.1.0
    STEP: "ceeee5759bc3091fac4f4a783cb3604c810ba136b594263825ef28170d37e17a",
    SAMPLING_IDS: "9454b8db2181fb9da32da05c2975a64b940c9cc9cb357621908c821e403ea86b",
    RAS: "15679987eda634456238dff142700f24384165ea6fa6616e62fef4ca979d221b",
    NUCLEUS: "b134b4d80973018cb95f352de681de3f4d7a2369ff8c3ae38fbb584221cec067",
    RANDOM: "989f0fc8f2162c7c64393c21d1355d611ee448f0faa140020110d81c35b78186",
}
PATCHES_OF_CHECKOUT = _patches(checkout=True)  # of CosyVoice2's and CosyVoice3's model there
SOURCES_OF_CHECKOUT = {  # commit ace7c47f41bb
    STEP: SOURCES[STEP],
    SAMPLING_IDS: "63151c31bcb08b0f5c35c565632cd26a0d538b8616644fc3815c3a3e02a4857e",
    RAS: "018d09b1e44ab5eef890cf301a6ccfa55f2f42c00d9681dfbdfa61eabf32559e",
    NUCLEUS: "b177cc7f078e82ab864f8c688f4013564d676211d042e2b47da54d2c4bbdd493",
    RANDOM: "f2121459bb87c07a58c88ce03240d56dba72629a7ce3eb352a1fed3147d77d96",
}
