"""Correctly rounded single operations, each with a twin for every place where kernels run.

``TARGET`` is what ``target()`` returns, passed as a constexpr. On CUDA inline PTX keeps the compiler from contracting a
product into a fused multiply-add; on ROCm launch with ``enable_fp_fusion=False``; the interpreter rounds every
operation by itself. Division and square root need no twin: ``tl.div_rn`` and ``tl.sqrt_rn`` exist everywhere.
"""

from __future__ import annotations

from typing import Literal

import torch

from voxfuse.kernels._triton import INTERPRETED, tl, triton


def target() -> Literal["interpreter", "cuda", "hip"]:
    """Where kernels run in this process."""
    if INTERPRETED:
        return "interpreter"
    return "hip" if torch.version.hip else "cuda"


@triton.jit
def mul_rn(a, b, TARGET: tl.constexpr):
    """fp32 a · b, rounded to nearest by itself."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a * b


@triton.jit
def add_rn(a, b, TARGET: tl.constexpr):
    """fp32 a + b, rounded to nearest by itself."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return a + b


@triton.jit
def round_tf32(x, TARGET: tl.constexpr):
    """fp32 rounded to TF32 (10 fraction bits), nearest with ties away, as ``cvt.rna.tf32.f32``; tl.dot truncates."""
    if TARGET == "cuda":
        bits = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)
        return bits.to(tl.float32, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)


@triton.jit
def narrowed(x, like, TARGET: tl.constexpr):
    """fp32 in the type of ``like``, to nearest even; the interpreter's own cast to bf16 truncates."""
    if TARGET == "interpreter" and like.dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        bits = tl.where(finite, (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000, bits)
        return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(like.dtype)
