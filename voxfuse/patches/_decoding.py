"""What patches of decode loops share: ``CachedDecoding`` with what the engine knows of transformers' own classes.

And the forward of transformers' decoders (Qwen2Model, Qwen3Model, LlamaModel), by which ``generate`` and every loop of
somebody else's that calls the model token by token come to captured steps. Prefill stays upstream's.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from voxfuse.fusions.decode_cache import CachedDecoding
from voxfuse.fusions.decode_graph import DECODE_GRAPH
from voxfuse.kernels._op import Run
from voxfuse.patches import registry, switches
from voxfuse.patches.guards import check_sources, installed_version, replaced_by, resolve, shadowed_by
from voxfuse.patches.seals import seal
from voxfuse.patches.spec import Patch

CACHE_NAMES = ("cache", "past_key_values", "past_key_value")  # of transformers 5.24, 4.57 and 4.51
OUTPUTS = ("output_attentions", "output_hidden_states")
KNOWN = (*OUTPUTS, "cache_position", "return_dict")  # other arguments of a forward, which are asked about
SHORT_MASK = "the attention mask is shorter than the cache: transformers 4.53 and newer hide what is behind its end"


def decoding(run: Run) -> CachedDecoding:
    """The decode steps of one patch."""
    return CachedDecoding(run, switches.read().capture, foreign=foreign_decoder, shadowed=_shadowed)


def bypassed(module: nn.Module) -> str | None:
    """Why a module, whose ``forward`` a step goes past, cannot be left out, or None."""
    if module._forward_hooks or module._forward_pre_hooks:
        return f"{type(module).__name__} has a forward hook, which a fused step would not run"
    return shadowed_by(module, "forward")


def foreign_decoder(decoder: Any) -> str | None:
    """Why the classes of a decoder are not transformers' own as they were tested, or None."""
    patch = _patches_by_class().get(type(decoder))
    if patch is None:
        return f"{type(decoder).__module__}.{type(decoder).__name__} is not a decoder of a tested transformers"
    upstream = [resolve(path) for path in patch.absorbs]
    found = (reason for each in upstream if (reason := replaced_by(each)) is not None)
    return next(found, None) or _untested(patch, tuple(each.function for each in upstream))


def _patches_by_class() -> dict[type, Patch]:
    stack = registry.patches_of("transformers")
    assert stack is not None
    found: dict[type, Patch] = {}
    for patch in stack.patches:
        if patch.fusion is DECODE_GRAPH:
            try:
                owner = resolve(patch.target).owner
            except LookupError:  # of a model that nobody has imported
                continue
            if isinstance(owner, type):
                found[owner] = patch
    return found


@functools.lru_cache(maxsize=64)
def _untested(patch: Patch, functions: tuple[Any, ...]) -> str | None:
    """The problem that the sources of these upstream functions are; read once."""
    stack = registry.patches_of("transformers")
    assert stack is not None
    return check_sources(stack, patch, installed_version(stack.distribution) or "unknown").problem


def _shadowed(part: nn.Module) -> bool:
    return shadowed_by(part, "forward") is not None or seal(part) is not None


@functools.cache
def pads_short_masks() -> bool:
    """Whether this transformers (4.53 and newer) hides all keys behind the end of an attention mask; older ones ignore
    a mask of ones."""
    return importlib.util.find_spec("transformers.masking_utils") is not None


def masked(mask: Any, rows: int, tokens: int) -> str | None:
    """Why an attention mask is not one that lets each of ``rows`` see all of ``tokens`` keys, or None.

    It is read: the host waits for the device, as upstream's own look at it does.
    """
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != rows:
        return "the attention mask is not a tensor [rows, tokens]"
    if mask.shape[1] > tokens:
        return "the attention mask is longer than the cache"
    if mask.shape[1] < tokens and pads_short_masks():
        return SHORT_MASK
    return None if bool(mask.all()) else "the attention mask hides tokens: rows are padded"


def decoder_forward(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    """The replacement of a decoder's ``forward``."""
    upstream = inspect.unwrap(original)
    assert isinstance(upstream, FunctionType)
    names = [*inspect.signature(upstream).parameters][1:]
    cache_name = next(name for name in CACHE_NAMES if name in names)
    make_output = upstream.__globals__["BaseModelOutputWithPast"]
    steps = decoding(run)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        cache = next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)
        embeddings = given.get("inputs_embeds")
        inputs = given.get("input_ids") if embeddings is None else embeddings
        if cache is None or inputs is None or inputs.shape[1:2] != (1,):
            return original(self, *args, **kwargs)  # a prefill
        if torch.compiler.is_compiling() or _captured_by_others(inputs):
            return original(self, *args, **kwargs)
        reason = _unserved(self, given, cache, inputs)
        if reason is not None:
            steps.count(reason)
            return original(self, *args, **kwargs)
        hidden = steps.step(self, self.embed_tokens(inputs) if embeddings is None else embeddings, cache)
        if isinstance(hidden, str):
            return original(self, *args, **kwargs)
        return make_output(last_hidden_state=hidden, **{cache_name: cache})

    return forward


def _captured_by_others(inputs: torch.Tensor) -> bool:
    """Whether the call is recorded into somebody else's CUDA graph, where the host can read nothing."""
    return inputs.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _unserved(decoder: Any, given: dict[str, Any], cache: Any, inputs: torch.Tensor) -> str | None:
    """Why a call with one new token a row must run upstream, or None: what it asks for beside the hidden state."""
    for name in OUTPUTS:
        wanted = given.get(name)
        if getattr(decoder.config, name, False) if wanted is None else wanted:
            return f"{name} is on"
    use_cache = given.get("use_cache")
    if not (decoder.config.use_cache if use_cache is None else use_cache):
        return "use_cache is off"
    if given.get("return_dict") is False or not getattr(decoder.config, "return_dict", True):
        return "return_dict is off"
    served = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache", *CACHE_NAMES, *KNOWN}
    if other := sorted(name for name, value in given.items() if name not in served and value is not None):
        return f"the call has arguments that a step does not know: {', '.join(other)}"
    if type(cache).__name__ != "DynamicCache":  # asked before its length
        return None
    tokens = cache.get_seq_length() + 1
    if (hidden := masked(given.get("attention_mask"), inputs.shape[0], tokens)) is not None:
        return hidden
    positions = given.get("position_ids")
    positions = given.get("cache_position") if positions is None else positions
    if positions is not None and not bool((positions == tokens - 1).all()):
        return "the position is not the number of tokens in the cache"
    return None
