"""A convolution of a Snake vocoder with its neighbours in one pass: r = conv(snake_in(x)) + bias + residual,
y = snake_out(r), where snake(r) = r + sin²(alpha · r) / (alpha + 1e-9).

Layouts: x [rows, frames, in channels] and residual [rows, frames, out channels], channels contiguous, rows and frames
at multiples of 16 bytes; r and y [rows, frames, out channels] contiguous, zero behind each row's valid length
(``lengths`` [rows]; all frames for None), whatever x and residual hold there. weight [out, taps, in]; tiles is what
``_hopper_conv.packed`` makes of it. alpha_in [in], bias and alpha_out [out]; any of them and residual may be None. r
is only written where ``keep``, y only where there is an alpha_out; what is not written has no elements. ``before`` says
how many taps lie before the frame that is written, the others lie behind it, ``dilation`` frames apart; frames outside
of a row are zeros.
Contract: same-precision. Products of fp32 are TF32 as cuDNN's by default, operands rounded to nearest; fp16 and bf16
round where the convolution reads and at the end of r and y. The sine is ``_math.sin_squared``.
Envelope: fp32 where cuDNN may use TF32, fp16, bf16, one type for all; 64, 128 or 256 channels in, 64 or a multiple of
128 out; odd taps, at most 15, that span at most 65 frames; compute capability 9.0 (``_hopper_conv``) and no interpreter
(Gluon has none); inference only.
Source: ResBlock.forward in cosyvoice/hifigan/generator.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from voxfuse.kernels._gluon import gl, gluon
from voxfuse.kernels._hopper_conv import (
    configuration,
    convolve,
    fetch,
    halo_frames,
    snake_of,
    stage_frames,
    unsupported_by_hopper,
)
from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import fused_op
from voxfuse.kernels.moments import neighbours_unsupported, valid_frames
from voxfuse.kernels.snake import EPS

IN_CHANNELS = (64, 128, 256)
MAX_N = 128  # out channels of a program


@gluon.jit
def _finish(
    r, raw_ptr, y_ptr, bias_ptr, residual_ptr, alpha_ptr, first_frame, residual_offset, stride_rt, first, first_channel,
    length, T, OUT: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Bias, residual and Snake of products r [frames, channels], and what is written of them."""
    layout: gl.constexpr = r.type.layout
    t = first + gl.arange(0, r.shape[0], gl.SliceLayout(1, layout))
    channel = first_channel + gl.arange(0, r.shape[1], gl.SliceLayout(0, layout))
    written = (t < T)[:, None]
    valid = (t < length)[:, None]
    if bias_ptr is not None:
        r += gl.load(bias_ptr + channel).to(gl.float32)[None, :]
    if residual_ptr is not None:
        source = residual_ptr + residual_offset + t[:, None] * stride_rt + channel[None, :]
        r += gl.load(source, mask=valid, other=0.0).to(gl.float32)
    r = gl.where(valid, r, 0.0)
    if raw_ptr is not None:
        gl.store(raw_ptr + first_frame * OUT + t[:, None] * OUT + channel[None, :], r.to(dtype), mask=written)
    if y_ptr is not None:
        y = snake_of(r, gl.load(alpha_ptr + channel).to(gl.float32)[None, :])
        y = gl.where(valid, y, 0.0).to(dtype)
        gl.store(y_ptr + first_frame * OUT + t[:, None] * OUT + channel[None, :], y, mask=written)


@gluon.jit(do_not_specialize=["T", "blocks"])
def _conv_kernel(
    x_ptr, raw_ptr, y_ptr, weight_ptr, alpha_in_ptr, bias_ptr, residual_ptr, alpha_out_ptr, lengths_ptr,
    T, blocks, stride_xb, stride_xt, stride_rb, stride_rt, dilation, before,
    IN: gl.constexpr, OUT: gl.constexpr, N: gl.constexpr, TAPS: gl.constexpr, HALO: gl.constexpr, M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One program a (row, block of M frames, block of N out channels), the last fastest: they share what they read."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    BITS: gl.constexpr = dtype.primitive_bitwidth
    CHUNK: gl.constexpr = 1024 // BITS
    ROWS: gl.constexpr = M + HALO
    CHUNKS: gl.constexpr = IN // CHUNK
    STEPS: gl.constexpr = TAPS * CHUNKS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, N, 256 // BITS]
    )
    program = gl.program_id(0)
    first_channel = (program % (OUT // N)) * N
    first = (program // (OUT // N) % blocks) * M
    row = (program // (OUT // N) // blocks).to(gl.int64)
    length = T if lengths_ptr is None else gl.minimum(gl.load(lengths_ptr + row).to(gl.int32), T)
    tile = gl.allocate_shared_memory(dtype, [CHUNKS * ROWS // 8, 8, CHUNK], swizzled)
    ring = gl.allocate_shared_memory(dtype, [STAGES, N, CHUNK], swizzled)
    weight_ptr += first_channel * CHUNK
    for step in gl.static_range(STAGES - 1):
        fetch(ring, weight_ptr, step, STEPS, OUT, N, CHUNK, BITS)
    x_ptr += row * stride_xb
    stage_frames(
        tile, x_ptr, alpha_in_ptr, stride_xt, first - before * dilation, length, M, HALO, IN, CHUNK, BITS
    )  # fmt: skip

    r = gl.zeros([M, N], gl.float32, product)
    r = convolve(tile, ring, weight_ptr, 0, dilation, r, STEPS, STEPS, CHUNKS, M, ROWS, OUT, N, CHUNK, BITS)
    left, right = gl.split(gl.permute(gl.reshape(r, [M, 2, N // 2]), (0, 2, 1)))  # of one half at a time: registers
    for half in gl.static_range(2):
        _finish(
            left if half == 0 else right, raw_ptr, y_ptr, bias_ptr, residual_ptr, alpha_out_ptr,
            row * T, row * stride_rb, stride_rt, first, first_channel + half * (N // 2), length, T, OUT, dtype,
        )  # fmt: skip


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: torch.Tensor,
    alpha_in: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha_out: torch.Tensor | None,
    lengths: torch.Tensor | None,
    dilation: int,
    before: int,
    keep: bool,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if (reason := unsupported_by_hopper(x, weight, tiles, dilation)) is not None:
        return reason
    rows, frames, channels = x.shape
    out_channels, taps, _ = weight.shape
    if channels not in IN_CHANNELS or (out_channels != 64 and out_channels % MAX_N):
        return f"expected {IN_CHANNELS} channels in and 64 or a multiple of 128 out, got {channels} and {out_channels}"
    if not 0 <= before < taps:
        return f"taps before the frame must be 0 to {taps - 1}, got {before}"
    for name, part, size in (("alpha_in", alpha_in, channels), ("alpha_out", alpha_out, out_channels)):
        if part is not None and (part.dtype != x.dtype or part.shape != (size,) or not part.is_contiguous()):
            return f"{name} must be contiguous {x.dtype} [{size}], got {part.dtype} {tuple(part.shape)}"
    if residual is not None and (residual.data_ptr() % 16 or residual.stride(-1) != 1):
        return f"residual must have contiguous channels at 16 bytes, got strides {residual.stride()}"
    return neighbours_unsupported((rows, frames, out_channels), x.dtype, bias, residual, lengths)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: torch.Tensor,
    alpha_in: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha_out: torch.Tensor | None,
    lengths: torch.Tensor | None,
    dilation: int,
    before: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The upstream chain, channels last, each row cut to its valid length first."""
    if x.shape[0] * x.shape[1] == 0:
        return _fake(x, weight, tiles, alpha_in, bias, residual, alpha_out, lengths, dilation, before, keep)
    behind = weight.shape[1] - 1 - before
    valid = valid_frames(x, lengths)
    x = torch.where(valid, x, 0.0)
    if alpha_in is not None:
        x = torch.where(valid, _snake(x, alpha_in), 0.0)
    x = F.pad(x.transpose(1, 2), (dilation * before, dilation * behind))
    r = F.conv1d(x, weight.transpose(1, 2), bias, dilation=dilation).transpose(1, 2)
    r = torch.where(valid, r if residual is None else r + residual, 0.0).contiguous()
    y = x.new_empty(0) if alpha_out is None else torch.where(valid, _snake(r, alpha_out), 0.0)
    return r if keep else x.new_empty(0), y


def _snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return x + (1.0 / (alpha + EPS)) * torch.pow(torch.sin(x * alpha), 2)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: torch.Tensor,
    alpha_in: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha_out: torch.Tensor | None,
    lengths: torch.Tensor | None,
    dilation: int,
    before: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:2], weight.shape[0])
    return x.new_empty(shape if keep else 0), x.new_empty(0 if alpha_out is None else shape)


@fused_op(
    "conv1d_snake",
    "(Tensor x, Tensor weight, Tensor tiles, Tensor? alpha_in, Tensor? bias, Tensor? residual, Tensor? alpha_out,"
    " Tensor? lengths, int dilation, int before, bool keep) -> (Tensor, Tensor)",
    reference=reference,
    unsupported=unsupported,
    fake=_fake,
)
def conv1d_snake(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: torch.Tensor,
    alpha_in: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha_out: torch.Tensor | None,
    lengths: torch.Tensor | None,
    dilation: int,
    before: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """r and y; shapes and formula in the module's docstring."""
    raw, y = _fake(x, weight, tiles, alpha_in, bias, residual, alpha_out, lengths, dilation, before, keep)
    if raw.numel() + y.numel() == 0:
        return raw, y
    rows, frames, channels = x.shape
    out_channels, taps, _ = weight.shape
    n, halo = min(out_channels, MAX_N), halo_frames(dilation * (taps - 1))
    m, stages, options = configuration(channels, n, x.element_size(), halo)
    blocks = -(-frames // m)
    launch(
        _conv_kernel,
        rows * blocks * (out_channels // n),
        (
            *(x, raw if keep else None, y if alpha_out is not None else None, tiles),
            *(alpha_in, bias, residual, alpha_out, lengths),
        ),
        (
            *(frames, blocks, x.stride(0), x.stride(1)),
            *((0, 0) if residual is None else residual.stride()[:2]),
            *(dilation, before),
        ),
        (),
        (channels, out_channels, n, taps, halo, m, stages),
        options,
    )
    return raw, y
