"""The next token of each row: repetition penalty, temperature, top-k, top-p and the draw in one kernel.

Layouts: logits [rows, vocabulary], unit inner stride; ``seen`` bool [rows, vocabulary], contiguous: tokens that the
penalty is for (None: no penalty); ``noise`` fp32 [rows, vocabulary], contiguous, exponential of rate 1; tokens int64
[rows]. In fp32, in transformers' order: x is penalised where seen (x·penalty below zero, else x/penalty), divided by
``temperature``, everything below the k-th largest leaves (ties stay; 0: all stay), then all whose probability summed
up from the smallest on is at most 1 − top_p (1.0: all stay). The token is argmax(softmax(x) / noise).
Random stream: upstream's. torch.multinomial of one sample draws ``empty_like(probabilities).exponential_()`` and takes
that argmax; ``draw`` makes the same draw, without multinomial's wait for the device. With NaN or only −inf in a row,
where upstream raises, the token has no meaning.
Contract: same-precision. The token differs from eager's where two candidates or the edge of top-p lie within rounding,
and where values tie at the edge of top-p: they stay together, upstream keeps some of them.
Envelope: fp32, fp16 or bf16, a vocabulary of up to 16 384; inference only.
Source: RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper and _sample of
transformers; multinomial of ATen (native/Distributions.cpp).
"""

from __future__ import annotations

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._math import exponential
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rows import power_of_two
from voxfuse.kernels._triton import tl, triton

MAX_VOCABULARY = 16_384  # a row is held in registers
ELEMENTS_A_THREAD = 32
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def softmax(x):
    """exp(x − max) / sum of a row in registers; −inf gives zero."""
    e = exponential(x - tl.max(x, axis=0))
    return tl.div_rn(e, tl.zeros_like(e) + tl.sum(e, axis=0))


@triton.jit
def _ordered(x):
    """fp32 as int32 of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 becomes 0
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _sampler_kernel(
    logits_ptr, seen_ptr, noise_ptr, token_ptr,
    N, K, stride_lr,
    temperature, below, penalty,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. The edges of top-k and top-p are found by bisection over the order of fp32."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    mask = n < N
    x = tl.load(logits_ptr + row * stride_lr + n, mask=mask, other=float("-inf")).to(tl.float32)  # [BLOCK]
    if seen_ptr is not None:
        seen = tl.load(seen_ptr + row * N + n, mask=mask, other=0)  # [BLOCK]
        x = tl.where(seen != 0, tl.where(x < 0.0, x * penalty, tl.div_rn(x, tl.zeros_like(x) + penalty)), x)
    x = tl.div_rn(x, tl.zeros_like(x) + temperature)
    order = _ordered(x)
    lowest = tl.min(tl.where(mask, order, 0x7FFFFFFF), axis=0).to(tl.int64)
    highest = tl.max(order, axis=0).to(tl.int64)
    if TOP_K:  # the largest bound that at least K reach
        low, high = lowest, highest
        for _ in range(32):
            middle = (low + high + 1) >> 1
            enough = tl.sum((mask & (order >= middle.to(tl.int32))).to(tl.int32), axis=0) >= K
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        x = tl.where(order >= low.to(tl.int32), x, float("-inf"))
        lowest = low
    p = softmax(x)
    if TOP_P:  # the smallest bound up to which more than ``below`` sums up
        low, high = lowest, highest
        for _ in range(32):
            middle = (low + high) >> 1
            beyond = tl.sum(tl.where(order <= middle.to(tl.int32), p, 0.0), axis=0) > below
            high = tl.where(beyond, middle, high)
            low = tl.where(beyond, low, tl.minimum(middle + 1, high))
        p = softmax(tl.where(order >= high.to(tl.int32), x, float("-inf")))
    noise = tl.load(noise_ptr + row * N + n, mask=mask, other=1.0)  # [BLOCK]
    scores = tl.where(mask, tl.div_rn(p, noise), -1.0)
    tl.store(token_ptr + row, tl.argmax(scores, axis=0).to(tl.int64))


def unsupported(
    logits: torch.Tensor,
    seen: torch.Tensor | None,
    noise: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    penalty: float,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if logits.dim() != 2 or logits.dtype not in FLOAT_TYPES or logits.stride(1) != 1:
        found = f"{logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}"
        return f"logits must be fp32, fp16 or bf16 [rows, vocabulary] with unit inner stride, got {found}"
    if not 1 <= logits.shape[1] <= MAX_VOCABULARY:
        return f"a vocabulary of {logits.shape[1]}, at most {MAX_VOCABULARY} is held in registers"
    if noise.shape != logits.shape or noise.dtype != torch.float32 or not noise.is_contiguous():
        found = f"{noise.dtype} {tuple(noise.shape)}"
        return f"noise must be contiguous fp32 {tuple(logits.shape)}, got {found}"
    if seen is not None and (seen.shape != logits.shape or seen.dtype != torch.bool or not seen.is_contiguous()):
        return f"seen must be contiguous bool {tuple(logits.shape)}, got {seen.dtype} {tuple(seen.shape)}"
    if temperature <= 0.0 or top_k < 0 or not 0.0 < top_p <= 1.0 or penalty <= 0.0:
        found = f"{temperature}, {top_k}, {top_p}, {penalty}"
        return f"expected temperature > 0, top_k ≥ 0, 0 < top_p ≤ 1 and penalty > 0, got {found}"
    return None


def reference(
    logits: torch.Tensor,
    seen: torch.Tensor | None,
    noise: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    penalty: float,
) -> torch.Tensor:
    """The upstream chain; fp64 logits stay fp64."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if seen is not None:
        x = torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x)
    x = x / temperature
    if top_k:
        x = x.masked_fill(x < x.topk(min(top_k, x.shape[1])).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ascending, index = x.sort(descending=False)
        leaves = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        leaves[:, -1] = False
        x = x.masked_fill(leaves.scatter(1, index, leaves), -torch.inf)
    return (x.softmax(dim=-1) / noise).argmax(dim=-1)


def draw(like: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """The noise that torch.multinomial draws for one sample of probabilities of this shape and device, in fp32."""
    return torch.empty(like.shape, dtype=torch.float32, device=like.device).exponential_(generator=generator)


def warps_of(block: int) -> int:
    """Warps that hold a row of ``block`` elements."""
    return min(max(block // (32 * ELEMENTS_A_THREAD), 4), 16)


@fused_op(
    "sample",
    "(Tensor logits, Tensor? seen, Tensor noise, float temperature, int top_k, float top_p, float penalty) -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda logits, *_: logits.new_empty(logits.shape[:1], dtype=torch.int64),
)
def sample(
    logits: torch.Tensor,
    seen: torch.Tensor | None,
    noise: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    penalty: float,
) -> torch.Tensor:
    """The next token of each row, int64 [rows]; formula in the module's docstring."""
    rows, vocabulary = logits.shape
    token = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return token
    block = power_of_two(vocabulary)
    launch(
        _sampler_kernel,
        rows,
        (logits, None if seen is None else seen.view(torch.uint8), noise, token),
        (vocabulary, min(top_k, vocabulary), logits.stride(0)),
        (temperature, 1 - top_p, penalty),
        (top_k > 0, top_p < 1.0, block),
        (("num_warps", warps_of(block)),),
    )
    return token
