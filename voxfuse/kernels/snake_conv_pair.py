"""A pair of convolutions of a Snake vocoder's residual block in one pass: y = x + conv2(snake2(conv1(snake1(x)))),
where snake(r) = r + sin²(alpha · r) / (alpha + 1e-9) and both convolutions add a bias.

Layouts: x [rows, frames, channels], channels contiguous, rows and frames at multiples of 16 bytes; y the same shape,
contiguous, zero behind each row's valid length (``lengths`` [rows]; all frames for None), whatever x holds there.
weights [2, out, taps, in], channels in and out, of both convolutions; tiles is what ``packed_pair`` makes of them.
alpha1, bias1, alpha2, bias2 [channels]. conv1 has ``dilation``, conv2 none; ``before1`` and ``before2`` say how many
taps lie before the frame that is written, the others lie behind it. Frames outside of a row are zeros to both.
Contract: same-precision. Products of fp32 are TF32 as cuDNN's by default, operands rounded to nearest; fp16 and bf16
round where a convolution reads and at the end, eager after every operation. The sine is ``_math.sin_squared``.
Envelope: fp32 where cuDNN may use TF32, fp16, bf16, one type for all; 64 or 128 channels; odd taps, at most 15, that
span at most 65 frames; compute capability 9.0 (its tensor cores read a tap's operand from the middle of a tile in
shared memory; ``_hopper_conv``) and no interpreter (Gluon has none); inference only.

One program makes M frames of what lies between the convolutions and M − taps + 1 of y; those behind a row's end only
write zeros. It reads x once from memory, and once more from L2 as the residual; what lies between never leaves the
chip. Weights are read by every program, from L2.
Source: ResBlock.forward in cosyvoice/hifigan/generator.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from voxfuse.kernels._gluon import barrier, gl, gluon
from voxfuse.kernels._hopper_conv import (
    MAX_HALO,
    configuration,
    convolve,
    fetch,
    halo_frames,
    operand,
    packed,
    snake_of,
    stage_frames,
    store_zeros,
    unsupported_by_hopper,
)
from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import fused_op
from voxfuse.kernels.moments import valid_frames
from voxfuse.kernels.snake import EPS

CHANNELS = (64, 128)
MOST_DILATION = 5  # of vocoders: pairs of the same channels and taps share a tile's size up to it, and one compilation


@gluon.jit(do_not_specialize=["T", "blocks", "dilation", "before1", "before2"])
def _pair_kernel(
    x_ptr, y_ptr, weight_ptr, alpha1_ptr, bias1_ptr, alpha2_ptr, bias2_ptr, lengths_ptr,
    T, blocks, stride_xb, stride_xt, dilation, before1, before2,
    C: gl.constexpr, TAPS: gl.constexpr, HALO: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program a (row, block of M - TAPS + 1 frames)."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BITS: gl.constexpr = dtype.primitive_bitwidth
    CHUNK: gl.constexpr = 1024 // BITS
    ROWS: gl.constexpr = M + HALO
    CHUNKS: gl.constexpr = C // CHUNK
    STEPS: gl.constexpr = 2 * TAPS * CHUNKS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, C, 256 // BITS]
    )
    program = gl.program_id(0)
    row = (program // blocks).to(gl.int64)
    first = (program % blocks) * (M - TAPS + 1)
    length = T if lengths_ptr is None else gl.minimum(gl.load(lengths_ptr + row).to(gl.int32), T)
    y_ptr += row * T * C
    if first >= length:  # behind the row's end: mixed lengths and buckets pay for little more than what is spoken
        store_zeros(y_ptr, first, gl.minimum(first + M - TAPS + 1, T), M, C, CHUNK, BITS)
        return
    tile = gl.allocate_shared_memory(dtype, [CHUNKS * ROWS // 8, 8, CHUNK], swizzled)
    ring = gl.allocate_shared_memory(dtype, [STAGES, C, CHUNK], swizzled)
    for step in gl.static_range(STAGES - 1):
        fetch(ring, weight_ptr, step, STEPS, C, C, CHUNK, BITS)
    x_ptr += row * stride_xb
    lead = first - before2 - before1 * dilation
    stage_frames(tile, x_ptr, alpha1_ptr, stride_xt, lead, length, M, HALO, C, CHUNK, BITS)

    i = gl.arange(0, M, gl.SliceLayout(1, product))
    channel = gl.arange(0, C, gl.SliceLayout(0, product))
    h = gl.zeros([M, C], gl.float32, product)
    h = convolve(tile, ring, weight_ptr, 0, dilation, h, STEPS, TAPS * CHUNKS, CHUNKS, M, ROWS, C, C, CHUNK, BITS)
    h += gl.load(bias1_ptr + channel).to(gl.float32)[None, :]
    h = snake_of(h, gl.load(alpha2_ptr + channel).to(gl.float32)[None, :])
    u = first - before2 + i
    h = gl.where(((u >= 0) & (u < length))[:, None], h, 0.0)
    barrier()  # all products with the tile are done: what lies between takes its place, in blocks of M rows
    tile._reinterpret(dtype, [M, C], swizzled).store(operand(h, dtype))

    y = gl.zeros([M, C], gl.float32, product)
    y = convolve(tile, ring, weight_ptr, TAPS * CHUNKS, 1, y, STEPS, TAPS * CHUNKS, CHUNKS, M, M, C, C, CHUNK, BITS)
    t = first + i
    written = ((i < M - TAPS + 1) & (t < T))[:, None]  # the last rows' taps reach beyond the tile
    valid = written & (t < length)[:, None]
    y += gl.load(bias2_ptr + channel).to(gl.float32)[None, :]
    y += gl.load(x_ptr + t[:, None] * stride_xt + channel[None, :], mask=valid, other=0.0).to(gl.float32)
    y = gl.where(valid, y, 0.0)
    gl.store(y_ptr + t[:, None] * C + channel[None, :], y.to(dtype), mask=written)


def packed_pair(weights: torch.Tensor) -> torch.Tensor:
    """weights [2, out, taps, in] as the kernel reads them, both in one tensor."""
    return torch.stack([packed(weight) for weight in weights])


def unsupported(
    x: torch.Tensor,
    weights: torch.Tensor,
    tiles: torch.Tensor,
    alpha1: torch.Tensor,
    bias1: torch.Tensor,
    alpha2: torch.Tensor,
    bias2: torch.Tensor,
    lengths: torch.Tensor | None,
    dilation: int,
    before1: int,
    before2: int,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if (reason := unsupported_by_hopper(x, weights, tiles, dilation)) is not None:
        return reason
    rows, _, channels = x.shape
    taps = weights.shape[2]
    if channels not in CHANNELS or weights.shape != (2, channels, taps, channels):
        expected = " or ".join(map(str, CHANNELS))
        return f"weights must be [2, channels, taps, channels] of {expected} channels, got {tuple(weights.shape)}"
    if not 0 <= before1 < taps or not 0 <= before2 < taps:
        return f"taps before the frame must be 0 to {taps - 1}, got {before1} and {before2}"
    for name, part in (("alpha1", alpha1), ("bias1", bias1), ("alpha2", alpha2), ("bias2", bias2)):
        if part.dtype != x.dtype or part.shape != (channels,) or not part.is_contiguous():
            return f"{name} must be contiguous {x.dtype} [{channels}], got {part.dtype} {tuple(part.shape)}"
    if lengths is not None and (lengths.shape != (rows,) or not lengths.is_contiguous()):
        return f"lengths must be contiguous [{rows}], got {tuple(lengths.shape)}"
    return None


def reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    tiles: torch.Tensor,
    alpha1: torch.Tensor,
    bias1: torch.Tensor,
    alpha2: torch.Tensor,
    bias2: torch.Tensor,
    lengths: torch.Tensor | None,
    dilation: int,
    before1: int,
    before2: int,
) -> torch.Tensor:
    """The upstream chain, channels last, each row cut to its valid length before either convolution."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    spare = weights.shape[2] - 1
    valid = valid_frames(x, lengths)
    x = torch.where(valid, x, 0.0)
    y = x
    for weight, alpha, bias, d, before in (
        (weights[0], alpha1, bias1, dilation, before1),
        (weights[1], alpha2, bias2, 1, before2),
    ):
        y = y + (1.0 / (alpha + EPS)) * torch.pow(torch.sin(y * alpha), 2)
        y = F.pad(torch.where(valid, y, 0.0).transpose(1, 2), (d * before, d * (spare - before)))
        y = F.conv1d(y, weight.transpose(1, 2), bias, dilation=d).transpose(1, 2)
    return torch.where(valid, x + y, 0.0).contiguous()


def _fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


@fused_op(
    "snake_conv_pair",
    "(Tensor x, Tensor weights, Tensor tiles, Tensor alpha1, Tensor bias1, Tensor alpha2, Tensor bias2,"
    " Tensor? lengths, int dilation, int before1, int before2) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def snake_conv_pair(
    x: torch.Tensor,
    weights: torch.Tensor,
    tiles: torch.Tensor,
    alpha1: torch.Tensor,
    bias1: torch.Tensor,
    alpha2: torch.Tensor,
    bias2: torch.Tensor,
    lengths: torch.Tensor | None,
    dilation: int,
    before1: int,
    before2: int,
) -> torch.Tensor:
    """y; shapes and formula in the module's docstring."""
    y = x.new_empty(x.shape)
    rows, frames, channels = x.shape
    if y.numel() == 0:
        return y
    taps = weights.shape[2]
    halo = halo_frames(max(dilation * (taps - 1), min(MOST_DILATION * (taps - 1), MAX_HALO)))
    m, stages, options = configuration(channels, channels, x.element_size(), halo)
    blocks = -(-frames // (m - taps + 1))
    launch(
        _pair_kernel,
        rows * blocks,
        (x, y, tiles, alpha1, bias1, alpha2, bias2, lengths),
        (frames, blocks, x.stride(0), x.stride(1), dilation, before1, before2),
        (),
        (channels, taps, halo, m, stages),
        options,
    )
    return y
