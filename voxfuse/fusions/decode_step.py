"""One token of a Qwen2, Qwen3 or Llama decoder of transformers over a static cache, in five to ten kernels a layer.

``step`` takes the module as upstream built it. Beside it lie packed weights (query, key and value projections merged,
gate and up projections merged, a table of rotary embeddings): they cost their own size in memory once more.
A layer is: residual addition and RMSNorm · QKV product · head norms, rotary embedding and cache write · attention over
the cache (two kernels, one where the cache is short) · output product · residual addition and RMSNorm · gate and up
product · SwiGLU · down product. cuBLAS may add a kernel to a product that it splits. Where ``skinny_gemm`` was
measured to be faster (``fastest``), norm, SwiGLU and addition are in the products' own kernels: six or seven a layer.
Over a cache of at most 32 tokens ``small_attention`` turns, writes and attends in one kernel.
Layouts: embeddings [rows, 1, hidden]; cache keys and values [layers, rows, kv_heads, capacity, head_dim]; ``lengths``
int64 [rows] on the device: tokens of each row that the cache holds, which is also the position and the slot of the new
one. What the cache holds behind a row's end is not read, unless ``reads_whole_cache``. A row whose length is the
capacity is not written: the host has to know better (decode_graph does).
Contract: same-precision; every rounding of upstream's eager chain is kept (see the kernels). Merged products may sum in
another order than separate ones.
Source: Qwen2Model, Qwen3Model, LlamaModel of transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from voxfuse.fusions._cache_attention import attend_cache, hidden_behind, whole_cache_is_read
from voxfuse.fusions._projections import ORDER, Stream, added, merged, normed, normed_linear, normed_swiglu
from voxfuse.fusions.transformers_decoder import unsupported_mlp
from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels.gqa_decode import MAX_HEAD_DIM, MAX_QUERIES
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.rmsnorm import FLOAT_TYPES
from voxfuse.kernels.small_attention import MAX_KEYS, small_attention
from voxfuse.records import Fusion, FusionPattern

SMALL_ATTENTION = Fusion(
    name="small_attention",
    stacks=("transformers",),
    operations=("q_norm, k_norm", "rotary embedding", "KV cache update", "attention over at most 32 keys"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16, one token, at most 32 keys; inside decode_step over short caches; inference only",
    kernels=("small_attention",),
    patterns=(FusionPattern(modules=("Qwen3OmniMoeTalkerCodePredictorAttention",)),),
)
DECODERS = {"Qwen2Model": "Qwen2", "Qwen3Model": "Qwen3", "LlamaModel": "Llama"}
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not follow the length


class KeyValues(NamedTuple):
    """A static cache: keys and values [layers, rows, kv_heads, capacity, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def rows(self) -> int:
        return self.keys.shape[1]


def empty_cache(decoder: Any, rows: int, capacity: int) -> KeyValues:
    """A cache of the decoder's device and type, its contents undefined."""
    weight = decoder.layers[0].self_attn.k_proj.weight
    head_dim = decoder.layers[0].self_attn.head_dim
    shape = len(decoder.layers), rows, weight.shape[0] // head_dim, capacity, head_dim
    return KeyValues(*(torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(2)))


def step(
    decoder: Any,
    embeddings: torch.Tensor,
    cache: KeyValues,
    lengths: torch.Tensor,
    run: Run,
    head: nn.Module | None = None,
) -> torch.Tensor:
    """The next token of each row: its normed hidden state [rows, 1, hidden], or ``head`` of that.

    Writes the token's keys and values to slot ``lengths`` of the cache; ``lengths`` stays as it is. What
    ``unsupported`` names must be ruled out before.
    """
    stream = Stream(embeddings)
    valid, slots = lengths + 1, lengths.unsqueeze(1)
    mask = hidden_behind(valid, cache.keys[0]) if reads_whole_cache(decoder, cache) else None
    cos, sin = rotary_table(decoder, cache.capacity).index_select(0, lengths).unsqueeze(1).chunk(2, dim=-1)
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        weights = merged(attention, "q_proj", "k_proj", "v_proj")
        heads, stream = normed_linear(layer.input_layernorm, stream, *weights, run)
        y = _attend(attention, heads, cache.keys[index], cache.values[index], valid, mask, slots, cos, sin, run)
        stream = added(stream, y, attention.o_proj, run)
        y, stream = normed_swiglu(layer.post_attention_layernorm, stream, layer.mlp, run)
        stream = added(stream, y, layer.mlp.down_proj, run)
    if type(head) is nn.Linear:
        return normed_linear(decoder.norm, stream, head.weight, head.bias, run)[0]
    y, _ = normed(decoder.norm, stream, run)
    return y if head is None else head(y)


def reads_whole_cache(decoder: Any, cache: KeyValues) -> bool:
    """Whether ``step`` reads the cache behind the rows' ends too: whatever is there must be finite then."""
    q_heads = decoder.layers[0].self_attn.q_proj.weight.shape[0] // cache.keys.shape[4]
    return cache.capacity > MAX_KEYS and whole_cache_is_read(q_heads, cache.keys[0])


def _attend(
    attention: Any,
    projected: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    mask: torch.Tensor | None,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    run: Run,
) -> torch.Tensor:
    """Attention of projected queries, keys and values [rows, 1, .] before the output projection, [rows, 1, .]; keys and
    values [rows, kv_heads, capacity, head_dim] are written."""
    head_dim, kv_heads = keys.shape[3], keys.shape[1]
    heads = projected.view(*projected.shape[:2], -1, head_dim)
    q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], dim=2)
    q_weight = k_weight = None
    eps = 0.0
    if hasattr(attention, "q_norm"):
        q_weight, k_weight, eps = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon
    rope: tuple[Any, ...] = (cos, sin, q_weight, k_weight, eps, ORDER, "half", [], False, False)
    window = getattr(attention, "sliding_window", None) or 0
    if keys.shape[2] <= MAX_KEYS and not window:
        y = small_attention(q, k, v, keys, values, slots, *rope, attention.scaling, run=run)
    else:
        turned = qk_norm_rope_cached(q, k, v, keys, values, slots, *rope, run=run)
        y = attend_cache(turned, keys, values, valid, mask, attention.scaling, window, run)
    return y.flatten(2)


def rotary_table(decoder: Any, capacity: int) -> torch.Tensor:
    """cos and sin of the positions below ``capacity`` as the decoder's rotary embedding gives them, side by side:
    [capacity, 2·head_dim] of the weights' type."""
    rotary, weight = decoder.rotary_emb, decoder.norm.weight

    def build() -> torch.Tensor:
        positions = torch.arange(capacity, device=weight.device).unsqueeze(0)
        return torch.cat(rotary(weight.new_empty(0), positions), dim=-1)[0]

    return pack(rotary, f"table {capacity} {weight.dtype}", [rotary.inv_freq], build)


def adopt(cache: KeyValues, past: Any, lengths: list[int]) -> None:
    """Copy what upstream's prefill left in ``past`` to the start of each row of the cache.

    ``past``: a DynamicCache of transformers whose rows are padded on the left, if at all: the last ``lengths[row]`` of
    its tokens are the row's own. Raises ValueError where it is something else or does not fit.
    """
    reason = unknown_cache(past)
    if reason is not None:
        raise ValueError(reason)
    held = tensors(past)
    pairs = list(zip(held[::2], held[1::2], strict=True))
    longest = max(lengths)
    for keys, values in pairs:
        if keys.shape[:2] != cache.keys.shape[1:3] or keys.shape[2] < longest or longest > cache.capacity:
            expected = f"{list(cache.keys.shape[1:3])} with {longest} to {cache.capacity} tokens"
            raise ValueError(f"expected keys of (rows, kv heads) {expected}, got {list(keys.shape)}")
        if keys.dtype != cache.keys.dtype or values.shape != keys.shape:
            raise ValueError(f"expected {cache.keys.dtype} keys and values alike, got {keys.dtype} {list(keys.shape)}")
    if len(pairs) != cache.keys.shape[0]:
        raise ValueError(f"expected a cache of {cache.keys.shape[0]} layers, got {len(pairs)}")
    for index, (keys, values) in enumerate(pairs):
        for row, length in enumerate(lengths):
            for static, new in ((cache.keys, keys), (cache.values, values)):
                static[index, row, :, :length] = new[row, :, new.shape[2] - length :]


def tensors(past: Any) -> list[torch.Tensor]:
    """Keys and values of each layer of an upstream cache that is known, one after the other."""
    if hasattr(past, "layers"):
        return [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]
    return [tensor for pair in zip(past.key_cache, past.value_cache, strict=True) for tensor in pair]  # before 4.54


def unknown_cache(past: Any) -> str | None:
    """Why an upstream cache cannot be adopted, or None."""
    if type(past).__name__ != "DynamicCache":
        return f"the cache is {type(past).__name__}, expected DynamicCache"
    kinds = {type(layer).__name__ for layer in getattr(past, "layers", ())}
    if kinds - {"DynamicLayer"}:
        return f"the cache has layers {', '.join(sorted(kinds))}, expected DynamicLayer alone"
    return "the cache is offloaded" if getattr(past, "offloading", False) else None


def has_own_forward(part: nn.Module) -> bool:
    """Whether a module has a ``forward`` beside its class's."""
    return "forward" in vars(part)


def unsupported(decoder: Any, shadowed: Callable[[nn.Module], bool] = has_own_forward) -> str | None:
    """Why a decoder is not one that ``step`` computes, or None: adapters, hooks, types, other classes.

    ``shadowed``: whether a module runs another forward than its class's (fused ones of the same arithmetic are none).
    """
    family = DECODERS.get(type(decoder).__name__)
    if family is None or not type(decoder).__module__.startswith("transformers.models."):
        return f"the model is {type(decoder).__name__}, expected one of {', '.join(DECODERS)} of transformers"
    weight = decoder.norm.weight
    if weight.dtype not in FLOAT_TYPES:
        return f"weights must be fp32, fp16 or bf16, got {weight.dtype}"
    for name, parameter in decoder.named_parameters():
        if parameter.dtype != weight.dtype or parameter.device != weight.device:
            found = f"{name} is {parameter.dtype} on {parameter.device}"
            return f"expected weights of one type on one device, {weight.dtype} on {weight.device}; {found}"
        if parameter.is_inference():
            return f"{name} was made under torch.inference_mode: its changes cannot be seen, so it is not packed"
    rope = getattr(decoder.rotary_emb, "rope_type", "default")
    if rope not in STATIC_ROPES:
        return f"rotary embedding of type {rope}, expected one of {', '.join(STATIC_ROPES)}"
    if type(decoder.norm).__name__ != f"{family}RMSNorm":
        return f"the last norm is {type(decoder.norm).__name__}, expected {family}RMSNorm"
    for name, part in decoder.named_modules():
        if part is not decoder and (_hooked(part) or shadowed(part)):
            return f"{name} has a hook or a forward of its own, which a fused step would not run"
    return next((reason for reason in map(functools.partial(_foreign, family), decoder.layers) if reason), None)


def _hooked(part: nn.Module) -> bool:
    """Whether a module has forward hooks other than those of transformers 5, which rest where no outputs are wanted."""
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


def _foreign(family: str, layer: Any) -> str | None:
    """Why a layer is not upstream's own, or None."""
    attention, mlp = layer.self_attn, layer.mlp
    expected = {
        "self_attn": f"{family}Attention",
        "mlp": f"{family}MLP",
        "input_layernorm": f"{family}RMSNorm",
        "post_attention_layernorm": f"{family}RMSNorm",
    }
    expected |= {f"self_attn.{name}_proj": "Linear" for name in "qkvo"}
    expected |= {f"mlp.{name}_proj": "Linear" for name in ("gate", "up", "down")}
    if family == "Qwen3":
        expected |= {f"self_attn.{name}_norm": "Qwen3RMSNorm" for name in "qk"}
    for name, kind in expected.items():
        part: Any = layer.get_submodule(name)
        if type(part).__name__ != kind:
            return f"{name} is {type(part).__name__}, expected {kind}: adapters and quantised layers run upstream"
    if family == "Qwen3" and attention.q_norm.variance_epsilon != attention.k_norm.variance_epsilon:
        return "q_norm and k_norm have different epsilons"
    biases = [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]
    if 0 < sum(bias is None for bias in biases) < 3 or (mlp.gate_proj.bias is None) != (mlp.up_proj.bias is None):
        return "only some of the projections that are merged have a bias"
    if not hasattr(attention, "sliding_window") and getattr(attention.config, "use_sliding_window", False):
        return "a sliding window that the attention does not state itself (transformers before 4.53)"
    group = attention.q_proj.weight.shape[0] // attention.k_proj.weight.shape[0]
    if attention.head_dim > MAX_HEAD_DIM or group > MAX_QUERIES:
        found = f"{attention.head_dim} and {group}"
        return f"at most head_dim {MAX_HEAD_DIM} and {MAX_QUERIES} query heads for a key head, got {found}"
    return unsupported_mlp(mlp)
