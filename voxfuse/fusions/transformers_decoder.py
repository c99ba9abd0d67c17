"""The parts of a Llama-like decoder layer of transformers, fused: RMSNorm, gated MLP, attention.

Each function takes the module as upstream built it and touches none of its parameters; projections run through their
own modules, adapters and hooks included. Attention: per-head norms (Qwen3) and rotary embedding of queries and keys in
one launch, then the cache as upstream updates it, then ``gqa_attention``.
Source: Qwen2, Qwen3 and Llama of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from voxfuse.fusions.gqa_attention import Result
from voxfuse.kernels._op import Run
from voxfuse.kernels.qk_norm_rope import qk_norm_rope, split_heads
from voxfuse.kernels.rmsnorm import rms_norm
from voxfuse.kernels.swiglu import swiglu
from voxfuse.records import Fusion, FusionPattern

MODELS = ("Llama", "Qwen2", "Qwen3")
ROTATION = ("mul", "neg", "cat", "mul", "add")  # x · cos + rotate_half(x) · sin


def _patterns(module: str, *chains: tuple[str, ...]) -> tuple[FusionPattern, ...]:
    return tuple(
        FusionPattern(operations=operations, modules=(f"{model}{module}",)) for model in MODELS for operations in chains
    )


RMS_NORM = Fusion(
    name="rms_norm",
    stacks=("transformers",),
    operations=("RMSNorm",),
    contract="same-precision",
    envelope="fp32, fp16 or bf16, any width; inference only",
    kernels=("rmsnorm",),
    patterns=_patterns("RMSNorm", ()),
)
SWIGLU = Fusion(
    name="swiglu",
    stacks=("transformers",),
    operations=("silu", "mul"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16, hidden_act silu; inference only",
    kernels=("swiglu",),
    patterns=_patterns("MLP", ("silu",), ("mul",)),
)
GQA_ATTENTION = Fusion(
    name="gqa_attention",
    stacks=("transformers",),
    operations=("q_norm, k_norm", "rotary embedding", "repeat_kv", "scaled_dot_product_attention"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16, attn_implementation sdpa or voxfuse, no dropout; inference only",
    kernels=("qk_norm_rope", "gqa_decode"),
    patterns=(
        FusionPattern(modules=("Qwen3Attention", "Qwen3RMSNorm")),
        *_patterns("Attention", ROTATION, ("scaled_dot_product_attention",)),
    ),
)

Update = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Result]


def rms_norm_forward(module: Any, hidden_states: torch.Tensor, run: Run) -> torch.Tensor:
    """LlamaRMSNorm and its copies: normalise in fp32, cast, scale."""
    normed: torch.Tensor = rms_norm(
        hidden_states, module.weight, float(module.variance_epsilon), "cast_then_scale", run=run
    )
    return normed


def unsupported_mlp(module: Any) -> str | None:
    """Why a gated MLP is not SwiGLU, or None."""
    if type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"the activation is {type(module.act_fn).__name__}, expected SiLU"
    return None


def mlp_forward(module: Any, x: torch.Tensor, run: Run) -> torch.Tensor:
    """down_proj(silu(gate_proj(x)) · up_proj(x))."""
    y: torch.Tensor = module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x), run=run))
    return y


def attention_forward(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    update: Update,
    attend: Attend,
    run: Run,
) -> Result:
    """A decoder's self attention: [rows, tokens, hidden] in and out, and the weights where ``attend`` gives them.

    ``update`` hands new keys and values to the cache and gives all of them back; both [rows, kv_heads, ., head_dim].
    """
    head_dim = module.head_dim
    shape = (*hidden_states.shape[:-1], -1, head_dim)
    q, k, v = (project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))
    cos, sin = position_embeddings
    q_weight = k_weight = None
    eps = 0.0
    if hasattr(module, "q_norm"):
        q_weight, k_weight, eps = module.q_norm.weight, module.k_norm.weight, float(module.q_norm.variance_epsilon)
    packed = qk_norm_rope(q, k, cos, sin, q_weight, k_weight, eps, "cast_then_scale", "half", [], False, False, run=run)
    query, key = split_heads(packed, q.shape[2])
    key, value = update(key, v.transpose(1, 2))
    out, weights = attend(query, key, value)
    return module.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights
