"""The embeddings of a frame's codebooks, gathered and added in one launch: y = Σ_c table[offsets[c] + ids[c]].

Layouts: ids int64 or int32 [..., C], any strides whose leading dimensions merge into two; table [entries, hidden], unit
inner stride, the codebooks' tables one behind the other; offsets int64 [C], the first row of each codebook; all on the
device. y [..., hidden], contiguous, of the table's type. ``order`` says where upstream rounds:
- "once": Σ in fp32, rounded at its end: embeddings stacked and summed over codebooks. Qwen3-TTS, Qwen3-Omni, CSM.
- "mean": the same times 1/C. Qwen3-Omni's Code2Wav.
- "each": every addition is rounded: a loop over codebooks. Moshi, MOSS-TTS.
torch's embedding_bag takes one table too, but rounds once whatever upstream does, and leaves the addition of offsets
and the making of its own ones to further kernels at each call.
An id whose row is outside of the table gives NaN, in every order: the host cannot see it (the reference raises).
Contract: same-precision, for the order of the sum in "once" and "mean"; "each" is bitwise.
Envelope: fp32, fp16 or bf16, 1 to 64 codebooks; inference only.
Source: Qwen3OmniMoeTalkerForConditionalGeneration, Qwen3OmniMoeCode2Wav and Moshi of transformers.
"""

from __future__ import annotations

from typing import Literal

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rounding import add_rn, mul_rn, narrowed, target
from voxfuse.kernels._rows import leading
from voxfuse.kernels._triton import tl, triton

Order = Literal["once", "mean", "each"]
ORDERS = ("once", "mean", "each")
MAX_CODEBOOKS = 64
BLOCK = 512  # elements of a row that a program takes
WARPS = 4
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _embedding_sum_kernel(
    ids_ptr, table_ptr, offsets_ptr, y_ptr,
    INNER, N, BLOCKS, ENTRIES, stride_ia, stride_ib, stride_ic, stride_t,
    inverse_c,
    C: tl.constexpr, ORDER: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a (token, block of the embedding): its C rows, added in the order of the codebooks."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    n = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    ids_ptr += (token // INNER) * stride_ia + (token % INNER) * stride_ib
    like = tl.zeros([1], table_ptr.dtype.element_ty)
    sums = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(C):
        row = tl.load(offsets_ptr + c) + tl.load(ids_ptr + c * stride_ic).to(tl.int64)
        inside = (row >= 0) & (row < ENTRIES)
        values = tl.load(table_ptr + row * stride_t + n, mask=(n < N) & inside, other=float("nan"))  # [BLOCK]
        sums = add_rn(sums, values.to(tl.float32), TARGET)
        if ORDER == "each":
            sums = narrowed(sums, like, TARGET).to(tl.float32)
    if ORDER == "mean":
        sums = mul_rn(sums, tl.full([BLOCK], inverse_c, tl.float32), TARGET)
    tl.store(y_ptr + token * N + n, narrowed(sums, like, TARGET), mask=n < N)


def unsupported(ids: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, order: str) -> str | None:
    """Why a call is outside the envelope, or None."""
    if order not in ORDERS:
        return f"order must be one of {', '.join(ORDERS)}, got {order!r}"
    if ids.dim() == 0 or ids.dtype not in (torch.int32, torch.int64) or not 1 <= ids.shape[-1] <= MAX_CODEBOOKS:
        return f"ids must be int32 or int64 [..., 1 to {MAX_CODEBOOKS} codebooks], got {ids.dtype} {tuple(ids.shape)}"
    if leading(ids) is None:
        return f"leading dimensions of ids must merge into two, got strides {ids.stride()}"
    if table.dim() != 2 or table.dtype not in FLOAT_TYPES or table.stride(1) != 1:
        found = f"{table.dtype} {tuple(table.shape)} {table.stride()}"
        return f"table must be fp32, fp16 or bf16 [entries, hidden] with unit inner stride, got {found}"
    if offsets.shape != ids.shape[-1:] or offsets.dtype != torch.int64 or not offsets.is_contiguous():
        return f"offsets must be contiguous int64 [{ids.shape[-1]}], got {offsets.dtype} {tuple(offsets.shape)}"
    return None


def reference(ids: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, order: str) -> torch.Tensor:
    """The upstream chain of each order; an fp64 table stays fp64."""
    embeddings = torch.nn.functional.embedding(ids + offsets, table)
    if order == "once":
        return embeddings.sum(-2)
    if order == "mean":
        return embeddings.mean(-2)
    total = embeddings[..., 0, :]
    for codebook in range(1, ids.shape[-1]):
        total = total + embeddings[..., codebook, :]
    return total.clone()


@fused_op(
    "embedding_sum",
    "(Tensor ids, Tensor table, Tensor offsets, str order) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda ids, table, offsets, order: table.new_empty((*ids.shape[:-1], table.shape[1])),
)
def embedding_sum(ids: torch.Tensor, table: torch.Tensor, offsets: torch.Tensor, order: Order) -> torch.Tensor:
    """The sum of a token's embeddings, [..., hidden]; formula and orders in the module's docstring."""
    hidden, codebooks = table.shape[1], ids.shape[-1]
    y = torch.empty((*ids.shape[:-1], hidden), dtype=table.dtype, device=table.device)
    if y.numel() == 0:
        return y
    blocks = -(-hidden // BLOCK)
    launch(
        _embedding_sum_kernel,
        y.numel() // hidden * blocks,
        (ids, table, offsets, y),
        (*leading(ids)[:1], hidden, blocks, table.shape[0], *leading(ids)[1:], ids.stride(-1), table.stride(0)),  # type: ignore[index]
        (1.0 / codebooks,),
        (codebooks, order, target(), BLOCK),
        (("num_warps", WARPS), ("enable_fp_fusion", False)) if target() == "hip" else (("num_warps", WARPS),),
    )
    return y
