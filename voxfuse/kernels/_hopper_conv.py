"""Convolutions on Hopper's tensor cores, device functions in Gluon: one tile of frames in shared memory for all taps.

A tile holds frames along rows, in blocks of CHUNK channels of 128 bytes a row (the hardware's 128-byte swizzle). Its
rows lie 128 bytes apart, so that the operand of a tap is the same memory from a later row on: the swizzle is a function
of the address. What ``tl.dot`` would read from L2 once a tap is read once.

Weights, packed by ``packed``, are copied through a ring of STAGES slots, each one block of CHUNK in channels of a tap.
"""

from __future__ import annotations

import torch

from voxfuse.kernels._gluon import barrier, gl, gluon, hopper
from voxfuse.kernels._math import sin_squared
from voxfuse.kernels._rounding import round_tf32
from voxfuse.kernels._tuned import Options
from voxfuse.kernels.moments import FLOAT_TYPES, MAX_ROW_ELEMENTS

ROW_BYTES = 128
MULTIPROCESSOR_BYTES = 228 * 1024  # of shared memory
PROGRAM_BYTES = 1024  # that every program takes beside what it asks for
MAX_STAGES = 4
MAX_TAPS = 15
MAX_HALO = 64  # frames that a tile holds beyond M


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight [out, taps, in] as [taps, in / CHUNK, out, CHUNK]; fp32 rounded to the nearest TF32, ties away."""
    out_channels, taps, in_channels = weight.shape
    chunk = ROW_BYTES // weight.element_size()
    if weight.dtype == torch.float32:
        nearest = ((weight.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
        weight = torch.where(weight.isfinite(), nearest, weight)
    return weight.reshape(out_channels, taps, in_channels // chunk, chunk).permute(1, 2, 0, 3).contiguous()


def halo_frames(span: int) -> int:
    """Rows of a tile beyond M: a power of two from 8 on, so that blocks start where the swizzle's pattern does."""
    return max(8, 1 << (span - 1).bit_length())


def configuration(channels: int, n: int, element_bytes: int, halo: int) -> tuple[int, int, Options]:
    """(M, STAGES, launch options) for a tile of so many channels and products of n: two programs a multiprocessor where
    registers allow for it, and as many slots as fit beside the tile."""
    row_bytes = channels * element_bytes
    programs = 2 if row_bytes <= 256 else 1
    m = 256 if row_bytes <= 512 and (n <= 64 or programs == 1) else 128
    slots = (MULTIPROCESSOR_BYTES // programs - PROGRAM_BYTES - (m + halo) * row_bytes) // (n * ROW_BYTES)
    options = (("num_warps", 8), ("maxnreg", 128)) if programs == 2 else (("num_warps", 8),)
    return m, min(slots, MAX_STAGES), options


def placement_fault(device: torch.device) -> str | None:
    """Why these functions do not run there, or None."""
    if hopper is None:
        return "needs Gluon: Triton 3.6 or newer, not interpreted"
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return None


def _tf32_allowed() -> bool:
    """Asked of cuDNN's convolutions alone: ``cudnn.allow_tf32`` raises where RNNs are set otherwise."""
    return bool(torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32")


def suits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these functions run on a device in a type: what is known without the shapes."""
    return placement_fault(device) is None and dtype in FLOAT_TYPES and (dtype != torch.float32 or _tf32_allowed())


# What torch.compiler.assume_constant_result does, without the second that importing Dynamo takes: it cannot trace these
# questions.
suits._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported_by_hopper(x: torch.Tensor, weight: torch.Tensor, tiles: torch.Tensor, dilation: int) -> str | None:
    """Why these functions cannot convolve x [rows, frames, in] with weight [..., out, taps, in], or None."""
    if (reason := placement_fault(x.device)) is not None:
        return reason
    if x.dtype not in FLOAT_TYPES or weight.dtype != x.dtype or tiles.dtype != x.dtype:
        return f"dtypes must be one of fp32, fp16 and bf16, the same for all, got {x.dtype} and {weight.dtype}"
    if x.dtype == torch.float32 and not _tf32_allowed():
        return "torch.backends.cudnn.allow_tf32 is off, and fp32 is multiplied as TF32"
    if x.dim() != 3 or x.stride(2) != 1 or x.data_ptr() % 16 or any(s * x.element_size() % 16 for s in x.stride()[:2]):
        return f"x must be [rows, frames, channels] with frames at 16 bytes, got {tuple(x.shape)}, strides {x.stride()}"
    if x.shape[1] * x.stride(1) >= MAX_ROW_ELEMENTS:
        return f"a row must span fewer than 2^31 elements, got {x.shape[1]} frames at stride {x.stride(1)}"
    taps = weight.shape[-2]
    if weight.shape[-1] != x.shape[2] or taps % 2 == 0 or taps > MAX_TAPS:
        return f"weight must be [..., out, odd taps up to {MAX_TAPS}, {x.shape[2]}], got {tuple(weight.shape)}"
    if dilation < 1 or dilation * (taps - 1) > MAX_HALO:
        return f"taps must span at most {MAX_HALO + 1} frames, got {taps} taps with dilation {dilation}"
    if tiles.numel() != weight.numel() or not tiles.is_contiguous():
        return f"tiles must be packed from the weight, got {tuple(tiles.shape)} for {tuple(weight.shape)}"
    return None


@gluon.jit
def snake_of(x, alpha):
    """x + sin²(alpha · x) / (alpha + 1e-9), in fp32."""
    return x + gl.div_rn(1.0, alpha + 1e-9) * sin_squared(x * alpha)


@gluon.jit
def operand(x, dtype: gl.constexpr):
    """fp32 in the type in which tensor cores take it: TF32 rounded to nearest, or a half type."""
    if dtype == gl.float32:
        return round_tf32(x, "cuda")
    return x.to(dtype)


@gluon.jit
def tile_at(tile, row, ROWS: gl.constexpr, CHUNK: gl.constexpr, BITS: gl.constexpr):
    """ROWS rows of one block of channels of a tile, from row ``row`` on, any row: a view."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    rows = tile._reinterpret(tile.dtype, [tile.shape[0] * tile.shape[1], 1, CHUNK], flat)
    return rows.index(row)._reinterpret(tile.dtype, [ROWS, CHUNK], swizzled)


@gluon.jit
def _load_frames(
    x_ptr, stride_t, first, length, channel, FRAMES: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    t = first + gl.arange(0, FRAMES, gl.SliceLayout(1, layout))
    valid = ((t >= 0) & (t < length))[:, None]
    x = gl.load(x_ptr + t[:, None] * stride_t + channel[None, :], mask=valid, other=0.0)
    return x.to(gl.float32), valid


@gluon.jit
def stage_frames(
    tile, x_ptr, alpha_ptr, stride_t, first, length,
    M: gl.constexpr, HALO: gl.constexpr, C: gl.constexpr, CHUNK: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Snake (none without alpha) of M + HALO frames of x from ``first`` on, to a tile; zero outside of 0 … length."""
    layout: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [gl.num_warps(), 1], [1, 0])
    for block in gl.static_range(C // CHUNK):
        channel = block * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        x, valid = _load_frames(x_ptr, stride_t, first, length, channel, M, layout)
        halo, halo_valid = _load_frames(x_ptr, stride_t, first + M, length, channel, HALO, layout)
        if alpha_ptr is not None:
            alpha = gl.load(alpha_ptr + channel).to(gl.float32)[None, :]
            x = gl.where(valid, snake_of(x, alpha), 0.0)
            halo = gl.where(halo_valid, snake_of(halo, alpha), 0.0)
        tile_at(tile, block * (M + HALO), M, CHUNK, BITS).store(operand(x, tile.dtype))
        tile_at(tile, block * (M + HALO) + M, HALO, CHUNK, BITS).store(operand(halo, tile.dtype))


@gluon.jit
def store_zeros(
    y_ptr, first, end, M: gl.constexpr, C: gl.constexpr, CHUNK: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    """Zeros to frames first … end, at most M, of y [frames, C]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [gl.num_warps(), 1], [1, 0])
    t = first + gl.arange(0, M, gl.SliceLayout(1, layout))
    for block in gl.static_range(C // CHUNK):
        channel = block * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        zeros = gl.zeros([M, CHUNK], y_ptr.dtype.element_ty, layout)
        gl.store(y_ptr + t[:, None] * C + channel[None, :], zeros, mask=(t < end)[:, None])


@gluon.jit
def fetch(
    ring, weight_ptr, step, STEPS: gl.constexpr, OUT: gl.constexpr, N: gl.constexpr, CHUNK: gl.constexpr,
    BITS: gl.constexpr,
):  # fmt: skip
    """Start to copy a step's weights of N of OUT channels to its slot; an empty group behind the last step."""
    layout: gl.constexpr = gl.BlockedLayout([1, 128 // BITS], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
    source = weight_ptr + step * (OUT * CHUNK) + row * CHUNK + column
    inside = gl.full([N, CHUNK], step, gl.int32, layout) < STEPS
    hopper.async_copy.async_copy_global_to_shared(ring.index(step % ring.shape[0]), source, mask=inside)
    hopper.async_copy.commit_group()


@gluon.jit
def convolve(
    tile, ring, weight_ptr, first_step, dilation, acc,
    STEPS: gl.constexpr, COUNT: gl.constexpr, CHUNKS: gl.constexpr, M: gl.constexpr, ROWS: gl.constexpr,
    OUT: gl.constexpr, N: gl.constexpr, CHUNK: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """acc [M, N] += sum over taps of rows tap · dilation … of a tile, by COUNT steps from ``first_step`` on.

    A tile has CHUNKS blocks of ROWS rows. STAGES − 1 steps are being copied when it starts and when it ends; all
    products are done when it ends.
    """
    stages: gl.constexpr = ring.shape[0]
    for i in range(COUNT):
        step = first_step + i
        hopper.async_copy.wait_group(stages - 2)
        hopper.fence_async_shared()
        barrier()  # what every warp copied or stored is in place
        a = tile_at(tile, (i % CHUNKS) * ROWS + (i // CHUNKS) * dilation, M, CHUNK, BITS)
        b = ring.index(step % stages).permute((1, 0))
        acc = hopper.warpgroup_mma(a, b, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        barrier()  # every warp has done with the step before, whose slot is next
        fetch(ring, weight_ptr, step + stages - 1, STEPS, OUT, N, CHUNK, BITS)
    return hopper.warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
