"""Arms of what a language model does for one token: norms, rotary embeddings, gated units, attention, projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope import qk_norm_rope
from voxfuse.kernels.rmsnorm import rms_norm
from voxfuse.kernels.skinny_gemm import skinny_linear, skinny_swiglu
from voxfuse.kernels.small_attention import small_attention
from voxfuse.kernels.swiglu import swiglu
from voxfuse.microbench.operation import Operation, around
from voxfuse.microbench.peers import Peer
from voxfuse.microbench.timer import Call, Inputs
from voxfuse.records import Case


def rms_norm_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x, weight, eps, order: the arguments of rms_norm."""
    x = around(0.0, 1.0, case.tensors["x"], generator)
    weight = around(1.0, 0.3, case.tensors["weight"], generator)
    return x, weight, float(case.parameters["eps"]), str(case.parameters["order"])


def swiglu_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """gate and up, each a tensor of its own."""
    return tuple(around(0.0, 1.0, case.tensors[name], generator) for name in ("gate", "up"))


def qk_norm_rope_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """q, k, cos, sin, norm weights (or None), eps, order, and half-split pairs: the arguments of qk_norm_rope."""
    tensors = case.tensors
    q, k = (around(0.0, 1.0, tensors[name], generator) for name in ("q", "k"))
    angle = 3 * torch.randn(tensors["cos"].shape, generator=generator, device=generator.device)
    cos, sin = (table.to(getattr(torch, tensors["cos"].dtype)) for table in (angle.cos(), angle.sin()))
    weights = [around(1.0, 0.3, tensors[n], generator) if n in tensors else None for n in ("q_weight", "k_weight")]
    return q, k, cos, sin, *weights, float(case.parameters["eps"]), "cast_then_scale", "half", [], False, False


def gqa_decode_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """q, k, v, no lengths (the whole cache is valid), no mask, scale, causal, window: the arguments of gqa_decode."""
    q, k, v = (around(0.0, 1.0, case.tensors[name], generator) for name in ("q", "k", "v"))
    return q, k, v, None, None, float(case.parameters["scale"]), True, 0


def projection_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """The arguments of skinny_linear, or of skinny_swiglu where the case has a gate; absent tensors are None."""
    tensors, x = case.tensors, around(0.0, 1.0, case.tensors["x"], generator)
    names = [name for name in ("weight", "gate", "up") if name in tensors]
    weights = [around(0.0, x.shape[-1] ** -0.5, tensors[name], generator) for name in names]
    others = ("gate_bias", "up_bias") if "gate" in tensors else ("bias", "residual")
    given = [around(0.0, 1.0, tensors[name], generator) if name in tensors else None for name in others]
    norm = around(1.0, 0.3, tensors["norm_weight"], generator) if "norm_weight" in tensors else None
    return x, *weights, *given, norm, float(case.parameters["eps"]), str(case.parameters["order"])


def cached_rope_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """The arguments of qk_norm_rope_cached, with every slot but the last held: the longest that a step sees."""
    tensors = case.tensors
    q, k, v, *caches = (around(0.0, 1.0, tensors[name], generator) for name in ("q", "k", "v", "k_cache", "v_cache"))
    slots = torch.full(tensors["slots"].shape, caches[0].shape[2] - 1, device=generator.device)
    angle = 3 * torch.randn(tensors["cos"].shape, generator=generator, device=generator.device)
    tables = (table.to(q.dtype) for table in (angle.cos(), angle.sin()))
    weights = [around(1.0, 0.3, tensors[n], generator) if n in tensors else None for n in ("q_weight", "k_weight")]
    norm = float(case.parameters["eps"]), "cast_then_scale"
    return q, k, v, *caches, slots, *tables, *weights, *norm, "half", [], False, False


def small_attention_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """The arguments of small_attention."""
    return *cached_rope_inputs(case, generator), float(case.parameters["scale"])


def liger(function: str, module: str, arguments: Callable[..., Inputs]) -> Peer:
    """An autograd function of Liger-Kernel."""
    return Peer(
        "liger-kernel",
        f"liger_kernel.ops.{module}:{function}",
        lambda found: lambda *inputs: found.apply(*arguments(*inputs)),
    )


def sdpa(attention: Callable[..., torch.Tensor]) -> Call:
    """torch's own grouped-query attention, in gqa_decode's layout."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> torch.Tensor:
        return attention(q, k, v, scale=others[2], enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return call


OPERATIONS: dict[str, Operation] = {
    "rms_norm": Operation(
        rms_norm,
        rms_norm_inputs,
        "an RMS norm",
        (liger("LigerRMSNormFunction", "rms_norm", lambda x, w, eps, _: (x, w, eps, 0.0, "llama", False)),),
    ),
    "swiglu": Operation(
        swiglu,
        swiglu_inputs,
        "a SwiGLU",
        (liger("LigerSiLUMulFunction", "swiglu", lambda gate, up: (gate, up)),),
    ),
    "skinny_gemm": Operation(skinny_linear, projection_inputs, "a product of a few rows with its norm and residual"),
    "skinny_swiglu": Operation(skinny_swiglu, projection_inputs, "a product of a few rows with norm and SwiGLU"),
    "qk_norm_rope": Operation(qk_norm_rope, qk_norm_rope_inputs, "a norm with rotary embedding and eager's roundings"),
    "small_attention": Operation(
        small_attention, small_attention_inputs, "a norm, rotary embedding, cache write and attention in one"
    ),
    "gqa_attention": Operation(
        gqa_decode,
        gqa_decode_inputs,
        "grouped-query attention of a token",
        (Peer("torch", "torch.nn.functional:scaled_dot_product_attention", sdpa),),
    ),
}
