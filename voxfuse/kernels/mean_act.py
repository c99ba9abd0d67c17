"""Mean of up to three tensors, LeakyReLU and a zero tail: y = act((a + b + c) / divisor), zero behind the row's length.

Layouts: a, b, c and y [rows, channels, frames], all contiguous or all channels last; c, or b and c, may be None;
``divisor`` is their number; act(v) = v for v >= 0, else v · ``slope`` (1: none). Frames from ``lengths[row]`` on are
zero whatever they held; None keeps all of them.
Contract: same-precision. In fp32 the same bits as eager on a GPU, which divides by a Python number as a product with
its reciprocal; fp16 and bf16 are rounded once, at the end, where eager rounds after every operation.
Envelope: fp32, fp16 or bf16, one type, shape and layout; inference only.
Source: the tail of the loops in Generator.forward of kokoro/istftnet.py (HiFi-GAN, arXiv:2010.05646).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._triton import tl, triton

BLOCK = 1024  # elements a program
WARPS = 4
MAX_ROW_ELEMENTS = 2**31 - 2**16  # offsets within a row are int32, and the last block may reach past its end
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _mean_act_kernel(
    a_ptr, b_ptr, c_ptr, y_ptr, lengths_ptr,
    C, T, size, blocks,
    scale, slope,
    CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a (row, block of its elements in memory order)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    t = i // C if CHANNELS_LAST else i % T
    length = T if lengths_ptr is None else tl.load(lengths_ptr + row).to(tl.int32)
    valid = (i < size) & (t < length)
    v = tl.load(a_ptr + row * size + i, mask=valid, other=0.0).to(tl.float32)  # [BLOCK]
    if b_ptr is not None:
        v += tl.load(b_ptr + row * size + i, mask=valid, other=0.0).to(tl.float32)
    if c_ptr is not None:
        v += tl.load(c_ptr + row * size + i, mask=valid, other=0.0).to(tl.float32)
    v = v * scale
    v = tl.where(v >= 0, v, v * slope)
    tl.store(y_ptr + row * size + i, tl.where(valid, v, 0.0).to(y_ptr.dtype.element_ty), mask=i < size)


def _channels_last(x: torch.Tensor) -> bool | None:
    """Whether x is channels last in memory; None where it is neither that nor contiguous."""
    if x.is_contiguous():
        return False
    return True if x.transpose(1, 2).is_contiguous() else None


def unsupported(
    a: torch.Tensor,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    lengths: torch.Tensor | None,
    divisor: float,
    slope: float,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if a.dim() != 3 or a.dtype not in FLOAT_TYPES:
        return f"a must be fp32, fp16 or bf16 [rows, channels, frames], got {a.dtype} {tuple(a.shape)}"
    if b is None and c is not None:
        return "c is given without b"
    tensors = [tensor for tensor in (a, b, c) if tensor is not None]
    if any(tensor.shape != a.shape or tensor.dtype != a.dtype for tensor in tensors):
        return f"tensors must be alike, got {', '.join(f'{t.dtype} {tuple(t.shape)}' for t in tensors)}"
    layouts = {_channels_last(tensor) for tensor in tensors}
    if layouts not in ({True}, {False}):
        return f"tensors must all be contiguous or all channels last, got strides {[t.stride() for t in tensors]}"
    if a.shape[1] * a.shape[2] >= MAX_ROW_ELEMENTS:
        return f"a row must have fewer than 2^31 elements, got {a.shape[1]} channels of {a.shape[2]} frames"
    if lengths is not None and (lengths.shape != a.shape[:1] or not lengths.is_contiguous()):
        return f"lengths must be contiguous [{a.shape[0]}], got {tuple(lengths.shape)}"
    return None


def reference(
    a: torch.Tensor,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    lengths: torch.Tensor | None,
    divisor: float,
    slope: float,
) -> torch.Tensor:
    """The upstream chain, then the zero tail."""
    total = a
    for other in (b, c):
        total = total if other is None else total + other
    y = F.leaky_relu(total if divisor == 1 else total / divisor, slope)
    if lengths is None:
        return y.clone() if y is a else y
    valid = torch.arange(a.shape[2], device=a.device) < lengths.view(-1, 1, 1)
    return torch.where(valid, y, 0.0)


@fused_op(
    "mean_act",
    "(Tensor a, Tensor? b, Tensor? c, Tensor? lengths, float divisor, float slope) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda a, b, c, lengths, divisor, slope: torch.empty_like(a),
)
def mean_act(
    a: torch.Tensor,
    b: torch.Tensor | None,
    c: torch.Tensor | None,
    lengths: torch.Tensor | None,
    divisor: float,
    slope: float,
) -> torch.Tensor:
    """act((a + b + c) / divisor) with a zero tail; shapes and formula in the module's docstring."""
    y = torch.empty_like(a)
    if y.numel() == 0:
        return y
    rows, channels, frames = a.shape
    size = channels * frames
    blocks = triton.cdiv(size, BLOCK)
    launch(
        _mean_act_kernel,
        rows * blocks,
        (a, b, c, y, lengths),
        (channels, frames, size, blocks),
        (1.0 / divisor, slope),
        (bool(_channels_last(a)), BLOCK),
        (("num_warps", WARPS),),
    )
    return y
