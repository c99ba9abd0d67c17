"""Attention for transformers models with grouped queries, in which repeated keys and values never materialise.

``register`` makes it known as ``attn_implementation="voxfuse"``; the decoder patches call ``attend`` themselves. Up to
16 new tokens go to ``gqa_decode``, one without a mask where that was measured to be faster (``kernels/_measured.py``);
all others to the best backend of torch's SDPA: to flash attention with ``enable_gqa`` where that runs, else to the
memory-efficient one with the group folded into the batch (keys and values then have a stride of 0 over the group).
Where only SDPA's MATH backend is left, that is counted: with enable_gqa and fp32 or a mask SDPA takes it silently
(pytorch #181528). What the kernels do not know (attention weights, soft caps, position biases, dropout) runs upstream's
own chain, counted.
Semantics are those of transformers' ``sdpa_attention_forward``: a mask, where given, says everything; without one,
several tokens are causal and aligned to the first key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)

from voxfuse.kernels._measured import gqa_wins
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.gqa_decode import MAX_TOKENS, gqa_decode
from voxfuse.records import Backend

NAME = "voxfuse"
RECEIPT = "attn_implementation=voxfuse"  # of models that ask for it by name, outside any set of patches
MATH = "SDPA has only its MATH backend for this call"
HALF_TYPES = (torch.float16, torch.bfloat16)
UNKNOWN = ("softcap", "position_bias", "s_aux", "head_mask")  # arguments that change the result, where they are set

Result = tuple[torch.Tensor, torch.Tensor | None]


def register(backend: Backend = "triton") -> None:
    """Make ``attn_implementation="voxfuse"`` known to the installed transformers; repeating it changes the backend.

    Raises ImportError where transformers is absent or older than 4.50.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_function(Run(backend, RECEIPT)))
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:  # before 4.53 each model makes a full mask for implementations that it does not know
        return
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attention_function(run: Run) -> Callable[..., Result]:
    """``attend`` with the signature of transformers' attention functions."""

    def voxfuse_attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Result:
        return attend(module, query, key, value, attention_mask, run, **kwargs)

    return voxfuse_attention_forward


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    run: Run,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Result:
    """Attention of query [rows, q_heads, tokens, head_dim] over key and value [rows, kv_heads, keys, head_dim].

    Gives [rows, tokens, q_heads, head_dim], and the weights where ``output_attentions`` asks for them.
    """
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if kwargs.get("output_attentions"):
        _count(run, "output_attentions: the weights are asked for")
        return _with_weights(query, key, value, attention_mask, scale, dropout, module)
    reason = _unknown(kwargs, dropout)
    if reason is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        _count(run, reason)
        result: Result = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return result
    tokens, keys = query.shape[2], key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(causal) and tokens > 1 and attention_mask is None
    if causal and keys > tokens:  # a static cache before its first token: aligned to the first key
        key, value = key[:, :, :tokens], value[:, :, :tokens]
    if attention_mask is not None and attention_mask.shape[-1] > keys:
        attention_mask = attention_mask[..., :keys]
    decode = (query, key, value, None, attention_mask, scale, causal, 0)
    if tokens <= MAX_TOKENS and gqa_decode.unsupported(*decode) is None and _wins(query, key, attention_mask):
        return gqa_decode(*decode, run=run), None
    return _prefill(query, key, value, attention_mask, scale, causal, run), None


def _wins(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether ``gqa_decode`` is faster than SDPA: as measured for one token without a mask, else taken for granted."""
    return query.shape[2] > 1 or mask is not None or torch.compiler.is_compiling() or gqa_wins(query.shape[1], key)


def _unknown(kwargs: dict[str, Any], dropout: float) -> str | None:
    if dropout:
        return "attention dropout is on"
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            return f"{name} is given"
    return None


def _prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    run: Run,
) -> torch.Tensor:
    """SDPA of many tokens, [rows, tokens, q_heads, head_dim]."""
    rows, q_heads, tokens, head_dim = query.shape
    grouped = q_heads != key.shape[1]
    flash = _flash(query, key, value, mask, causal, grouped)
    folds = grouped and not flash and (mask is None or (mask.shape[1] == 1 and (mask.shape[0] == 1 or rows == 1)))
    if folds:
        query, key, value = _folded(query, key, value)
    elif grouped and not flash:  # a mask of each row: the group is repeated, as upstream does
        group = q_heads // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if not flash and query.is_cuda and not torch.compiler.is_compiling():
        if not can_use_efficient_attention(SDPAParams(query, key, value, mask, 0.0, causal, False), False):
            _count(run, MATH)
        else:
            TALLIES.add(run.receipt)
    else:
        _count(run, None)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped and flash
    )
    return out.reshape(rows, q_heads, tokens, head_dim).transpose(1, 2).contiguous()


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    grouped: bool,
) -> bool:
    """Whether SDPA takes these tensors with ``enable_gqa`` to flash attention."""
    if torch.compiler.is_compiling():  # Dynamo cannot ask
        return mask is None and query.dtype in HALF_TYPES
    if not query.is_cuda:
        return False
    params = SDPAParams(query, key, value, mask, 0.0, causal, grouped)
    return can_use_flash_attention(params, False)  # cuDNN's may come behind MATH in torch's order of preference


def _folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows and kv heads as the batch, the group as heads: keys and values with a stride of 0 over the group."""
    rows, q_heads, tokens, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group = q_heads // kv_heads
    query = query.reshape(rows * kv_heads, group, tokens, head_dim)
    key, value = (x.reshape(rows * kv_heads, 1, keys, head_dim).expand(-1, group, -1, -1) for x in (key, value))
    return query, key, value


def _with_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    dropout: float,
    module: Any,
) -> Result:
    """transformers' eager_attention_forward, which also gives the weights [rows, q_heads, tokens, keys]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    tokens, keys = scores.shape[2:]
    if mask is None and tokens > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask[..., :keys], torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask[..., :keys]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _count(run: Run, reason: str | None) -> None:
    if not torch.compiler.is_compiling():
        TALLIES.add(run.receipt, fallback=reason)
