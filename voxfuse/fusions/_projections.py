"""Projections of a decode step with their neighbours, each as it was measured to be fastest.

A residual stream is (total, pending): their sum, where something is pending, is what the next norm sees. cuBLAS leaves
its product pending, since the norm's kernel adds it on the way; ``skinny_gemm`` adds it and norms by itself. Both round
where upstream rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels._skinny_choice import GATED, fastest
from voxfuse.kernels.rmsnorm import add_rms_norm, rms_norm
from voxfuse.kernels.skinny_gemm import skinny_linear, skinny_swiglu
from voxfuse.kernels.swiglu import swiglu
from voxfuse.records import Fusion, FusionPattern

SKINNY_GEMM = Fusion(
    name="skinny_gemm",
    stacks=("transformers",),
    operations=("RMSNorm", "linear", "silu, mul", "residual addition"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16, 1 to 16 rows; inside decode_step, at the shapes that were measured; inference only",
    kernels=("skinny_gemm",),
    patterns=tuple(
        FusionPattern(operations=("linear",), modules=(f"{model}DecoderLayer",))
        for model in ("Llama", "Qwen2", "Qwen3")
    ),
)
ORDER = "cast_then_scale"


class Stream(NamedTuple):
    """The residual stream of a decoder, [rows, 1, hidden] each."""

    total: torch.Tensor
    pending: torch.Tensor | None = None


def normed(norm: Any, stream: Stream, run: Run) -> tuple[torch.Tensor, Stream]:
    """RMSNorm of the stream, and the stream with nothing pending."""
    eps = float(norm.variance_epsilon)
    if stream.pending is None:
        return rms_norm(stream.total, norm.weight, eps, ORDER, run=run), stream
    y, total = add_rms_norm(stream.pending, stream.total, norm.weight, eps, ORDER, run=run)
    return y, Stream(total)


def normed_linear(
    norm: Any, stream: Stream, weight: torch.Tensor, bias: torch.Tensor | None, run: Run
) -> tuple[torch.Tensor, Stream]:
    """norm(stream) · weightᵀ + bias, and the stream with nothing pending."""
    if fastest(_rows(stream.total), weight) == "cublas":
        x, stream = normed(norm, stream, run)
        return F.linear(x, weight, bias), stream
    x, stream, scale = _unnormed(norm, stream, run)
    return skinny_linear(x, weight, bias, None, scale, float(norm.variance_epsilon), ORDER, run=run), stream


def normed_swiglu(norm: Any, stream: Stream, mlp: Any, run: Run) -> tuple[torch.Tensor, Stream]:
    """silu(gate_proj(norm(stream))) · up_proj(norm(stream)), and the stream with nothing pending."""
    gate, up = mlp.gate_proj, mlp.up_proj
    if fastest(_rows(stream.total), gate.weight, GATED) == "cublas":
        x, stream = normed(norm, stream, run)
        both = F.linear(x, *merged(mlp, "gate_proj", "up_proj")).chunk(2, dim=-1)
        return swiglu(*both, run=run), stream
    x, stream, scale = _unnormed(norm, stream, run)
    eps = float(norm.variance_epsilon)
    return skinny_swiglu(x, gate.weight, up.weight, gate.bias, up.bias, scale, eps, ORDER, run=run), stream


def added(stream: Stream, x: torch.Tensor, projection: nn.Linear, run: Run) -> Stream:
    """The stream plus ``projection`` of x; nothing may be pending."""
    weight, bias = projection.weight, projection.bias
    if fastest(_rows(x), weight) == "cublas":
        return Stream(stream.total, F.linear(x, weight, bias))
    return Stream(skinny_linear(x, weight, bias, stream.total, None, 0.0, ORDER, run=run))


def merged(module: Any, *names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of several projections of one input, joined along their outputs."""
    projections = [getattr(module, name) for name in names]
    weights, biases = [p.weight for p in projections], [p.bias for p in projections]
    present = [bias for bias in biases if bias is not None]

    def build() -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.cat(weights), torch.cat(present) if present else None

    return pack(module, "merged " + " ".join(names), [*weights, *present], build)


def _unnormed(norm: Any, stream: Stream, run: Run) -> tuple[torch.Tensor, Stream, torch.Tensor | None]:
    """What goes into a product that norms by itself, the stream, and the norm's weight; normed where that adds too."""
    if stream.pending is None:
        return stream.total, stream, norm.weight
    x, stream = normed(norm, stream, run)
    return x, stream, None


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]
