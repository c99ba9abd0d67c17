"""transformers: Qwen2, Qwen3 and Llama decoders. One-token steps from CUDA graphs; RMSNorm, gated MLP, self attention.

A general library: patched by its name or through a model instance, never by default. Qwen2 is also CosyVoice's language
model, Llama Chatterbox's T3. Attention is taken over where the model runs ``sdpa`` or ``voxfuse``; ``eager`` models
keep upstream's attention (somebody may read their weights) with fused norms and rotary embedding.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from voxfuse.fusions import gqa_attention, transformers_decoder
from voxfuse.fusions.decode_graph import DECODE_GRAPH
from voxfuse.fusions.gqa_attention import Result
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.patches._decoding import CACHE_NAMES, decoder_forward
from voxfuse.patches._transformers_sources import SOURCES
from voxfuse.patches.spec import Build, Patch, StackPatches

MODELS = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
NORMS = {"qwen3": "Qwen3RMSNorm"}  # the class of q_norm and k_norm, where a model has them
TAKEN_OVER = ("sdpa", gqa_attention.NAME)


def _module(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


def _path(model: str, attributes: str) -> str:
    return f"{_module(model)}:{attributes}"


def _load() -> None:
    for model in MODELS:
        importlib.import_module(_module(model))


def _count_fallback(run: Run, reason: str) -> None:
    if not torch.compiler.is_compiling():
        TALLIES.add(run.receipt, fallback=reason)


def _norm(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return transformers_decoder.rms_norm_forward(self, hidden_states, run)

    return forward


def _mlp(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        reason = transformers_decoder.unsupported_mlp(self)
        if reason is not None:
            _count_fallback(run, reason)
            return original(self, x)  # type: ignore[no-any-return]
        return transformers_decoder.mlp_forward(self, x, run)

    return forward


def _attention(norm: str | None) -> Build:
    def build(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
        upstream = inspect.unwrap(original).__globals__
        cache_name = next(
            name for name in CACHE_NAMES if name in inspect.signature(inspect.unwrap(original)).parameters
        )

        def forward(
            self: Any,
            hidden_states: torch.Tensor,
            position_embeddings: tuple[torch.Tensor, torch.Tensor],
            attention_mask: torch.Tensor | None = None,
            cache: Any = None,
            **kwargs: Any,
        ) -> Result:
            given = {name: kwargs.pop(name) for name in CACHE_NAMES if name in kwargs}
            cache = cache if cache is not None else next((c for c in given.values() if c is not None), None)
            reason = _foreign_norms(self, upstream, norm)
            if reason is not None:
                _count_fallback(run, reason)
                kwargs[cache_name] = cache
                return original(self, hidden_states, position_embeddings, attention_mask, **kwargs)  # type: ignore[no-any-return]
            attend = functools.partial(_attend, self, attention_mask, upstream, run, kwargs)
            update = functools.partial(_update, self, cache, cache_name, position_embeddings, kwargs)
            return transformers_decoder.attention_forward(self, hidden_states, position_embeddings, update, attend, run)

        return forward

    return build


def _foreign_norms(module: Any, upstream: dict[str, Any], norm: str | None) -> str | None:
    """Why the head norms are not upstream's own as they were tested, or None."""
    if norm is None:
        return None
    for part in (module.q_norm, module.k_norm):
        if type(part) is not upstream[norm]:
            return f"q_norm or k_norm is {type(part).__name__}, expected upstream's {norm}"
    if module.q_norm.variance_epsilon != module.k_norm.variance_epsilon:
        return "q_norm and k_norm have different epsilons"
    return None


def _update(
    module: Any,
    cache: Any,
    cache_name: str,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    kwargs: dict[str, Any],
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hand new keys and values to the cache, as each tested release does."""
    if cache is None:
        return key, value
    if cache_name == "cache":
        updated: tuple[torch.Tensor, torch.Tensor] = cache.update(key, value, module.layer_idx, kwargs=kwargs)
        return updated
    cos, sin = position_embeddings
    details = {"sin": sin, "cos": cos, "cache_position": kwargs.get("cache_position")}
    updated = cache.update(key, value, module.layer_idx, details)
    return updated


def _attend(
    module: Any,
    attention_mask: torch.Tensor | None,
    upstream: dict[str, Any],
    run: Run,
    kwargs: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> Result:
    """Attention in the implementation that the model asks for."""
    dropout = module.attention_dropout if module.training else 0.0
    implementation = module.config._attn_implementation
    if implementation in TAKEN_OVER:
        return gqa_attention.attend(
            module, query, key, value, attention_mask, run, dropout=dropout, scaling=module.scaling, **_options(kwargs)
        )
    function = upstream["eager_attention_forward"]
    if implementation != "eager":
        function = upstream["ALL_ATTENTION_FUNCTIONS"][implementation]
    _count_fallback(run, f"attn_implementation={implementation} runs upstream's attention")
    result: Result = function(
        module, query, key, value, attention_mask, dropout=dropout, scaling=module.scaling,
        sliding_window=_sliding_window(module), **kwargs,
    )  # fmt: skip
    return result


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("dropout", "scaling")}


def _sliding_window(module: Any) -> int | None:
    """The window that upstream hands to its attention functions; 4.51 works it out at every call of Qwen2."""
    if hasattr(module, "sliding_window") or not hasattr(module.config, "max_window_layers"):
        window: int | None = getattr(module, "sliding_window", None)
        return window
    config = module.config
    windowed = config.use_sliding_window and module.layer_idx >= config.max_window_layers
    return config.sliding_window if windowed else None


def _patches() -> tuple[Patch, ...]:
    found: list[Patch] = []
    for model, name in MODELS.items():
        norm, mlp, attention = (_path(model, f"{name}{part}.forward") for part in ("RMSNorm", "MLP", "Attention"))
        absorbed: tuple[str, ...] = (attention, _path(model, "apply_rotary_pos_emb"), _path(model, "rotate_half"))
        if model in NORMS:
            absorbed = (*absorbed, norm)
        decoder = _path(model, f"{name}Model.forward")
        step = decoder, _path(model, f"{name}DecoderLayer.forward"), _path(model, f"{name}RotaryEmbedding.forward")
        found += [
            Patch(
                fusion=DECODE_GRAPH,
                target=decoder,
                absorbs=tuple(dict.fromkeys((*step, *absorbed, norm, mlp))),
                build=decoder_forward,
            ),
            Patch(fusion=transformers_decoder.RMS_NORM, target=norm, absorbs=(norm,), build=_norm),
            Patch(fusion=transformers_decoder.SWIGLU, target=mlp, absorbs=(mlp,), build=_mlp),
            Patch(
                fusion=transformers_decoder.GQA_ATTENTION,
                target=attention,
                absorbs=absorbed,
                build=_attention(NORMS.get(model)),
            ),
        ]
    return tuple(found)


TRANSFORMERS = StackPatches(
    name="transformers",
    distribution="transformers",
    modules=tuple(_module(model) for model in MODELS),
    load=_load,
    sources=SOURCES,
    patches=_patches(),
)
