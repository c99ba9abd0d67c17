"""SwiGLU: y = silu(gate) · up, with silu(x) = x / (1 + exp(−x)).

Layouts: gate and up [..., width], any strides; y the same shape, contiguous. A packed projection [..., 2·width] is two
views: ``swiglu(packed[..., :width], packed[..., width:], run=run)``.
Contract: same-precision. silu is computed in fp32 and rounded to the type before the product, as eager does; exp is a
polynomial with a relative error below 1.5e-7, so that half types differ from eager in isolated elements at most.
Envelope: fp32, fp16 or bf16, one type and shape, leading dimensions that merge into two; inference only.
Source: Qwen2MLP, LlamaMLP of transformers (GLU variants, arXiv:2002.05202).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import exponential
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rounding import mul_rn, narrowed, target
from voxfuse.kernels._rows import leading_pair
from voxfuse.kernels._triton import tl, triton

BLOCK = 1024  # elements a program
WARPS = 4
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _swiglu_kernel(
    gate_ptr, up_ptr, y_ptr,
    INNER, N, BLOCKS, stride_ga, stride_gb, stride_gn, stride_ua, stride_ub, stride_un,
    TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a (row, block of its width)."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    gate_ptr += (row // INNER) * stride_ga + (row % INNER) * stride_gb
    up_ptr += (row // INNER) * stride_ua + (row % INNER) * stride_ub
    up = tl.load(up_ptr + n * stride_un, mask=mask, other=0.0)  # [BLOCK]
    gate = tl.load(gate_ptr + n * stride_gn, mask=mask, other=0.0).to(tl.float32)
    silu = narrowed(tl.div_rn(gate, 1.0 + exponential(-gate)), up, TARGET).to(tl.float32)
    y = mul_rn(silu, up.to(tl.float32), TARGET)
    tl.store(y_ptr + row * N + n, narrowed(y, up, TARGET), mask=mask)


def unsupported(gate: torch.Tensor, up: torch.Tensor) -> str | None:
    """Why a call is outside the envelope, or None."""
    if gate.dtype not in FLOAT_TYPES or up.dtype != gate.dtype:
        return f"gate and up must be of one type, fp32, fp16 or bf16, got {gate.dtype} and {up.dtype}"
    if gate.dim() == 0 or up.shape != gate.shape:
        return f"gate and up must be [..., width] alike, got {tuple(gate.shape)} and {tuple(up.shape)}"
    if leading_pair(gate, up) is None:
        return f"leading dimensions must merge into two alike, got strides {gate.stride()} and {up.stride()}"
    return None


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The upstream chain."""
    return F.silu(gate) * up


@fused_op(
    "swiglu",
    "(Tensor gate, Tensor up) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda gate, up: gate.new_empty(gate.shape),
)
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, [..., width]; formula in the module's docstring."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel() == 0:
        return y
    width = gate.shape[-1]
    inner, gate_outer, gate_inner, up_outer, up_inner = leading_pair(gate, up)  # type: ignore[misc]
    blocks = -(-width // BLOCK)
    launch(
        _swiglu_kernel,
        gate.numel() // width * blocks,
        (gate, up, y),
        (inner, width, blocks, gate_outer, gate_inner, gate.stride(-1), up_outer, up_inner, up.stride(-1)),
        (),
        (target(), BLOCK),
        (("num_warps", WARPS), ("enable_fp_fusion", False)) if target() == "hip" else (("num_warps", WARPS),),
    )
    return y
