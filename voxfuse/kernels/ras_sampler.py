"""CosyVoice's repetition-aware sampling in one kernel: a draw from the nucleus, replaced where it repeats too much.

Layouts: scores [rows, vocabulary] (log-probabilities or logits), unit inner stride; ``recent`` int64 [rows, window],
contiguous: the tokens decoded last, −1 where there are fewer; ``nucleus_noise`` fp32 [rows, top_k] and ``whole_noise``
fp32 [rows, vocabulary], contiguous, exponential of rate 1. The result is int64 [rows, 2]: the token, and 1 where
the second draw decided.
p = softmax(scores). The nucleus are the most probable tokens, at most top_k, as long as those before sum up to less
than ``top_p`` (summed one by one in fp32; of equal ones the lower index first). The token is the nucleus' argmax of
p / nucleus_noise. Where ``recent`` holds it at least ``repeats`` times (upstream: win_size · tau_r), it is drawn again:
argmax of p / whole_noise over all tokens, with ``exclude`` over all but the repeated one (newer upstream).
Random stream: torch.multinomial of one sample is this argmax with ``empty_like(p).exponential_()`` as noise. Upstream
draws for the nucleus' own size, which a GPU's generator gives as the start of a draw of top_k (a CPU's does not), and
makes the second draw only where it is needed: ``fusions/speech_sampler.py`` gives an unused one back.
Contract: same-precision. The token differs from eager's where two candidates or top_p's edge lie within rounding.
Envelope: fp32, fp16 or bf16, a vocabulary of up to 16 384, top_k and window up to 1 024; inference only.
Source: ras_sampling, nucleus_sampling, random_sampling of CosyVoice (cosyvoice/utils/common.py); VALL-E 2,
arXiv:2406.05370.
"""

from __future__ import annotations

import torch

from voxfuse.kernels._launch import launch
from voxfuse.kernels._op import fused_op
from voxfuse.kernels._rows import power_of_two
from voxfuse.kernels._triton import tl, triton
from voxfuse.kernels.sampler import FLOAT_TYPES, MAX_VOCABULARY, softmax, warps_of

MOST = 1_024  # of top_k and window


@triton.jit
def _ras_sampler_kernel(
    scores_ptr, recent_ptr, nucleus_ptr, whole_ptr, result_ptr,
    N, K, WINDOW, stride_sr,
    top_p, repeats,
    EXCLUDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program a row; the nucleus is taken out of the row's registers one by one."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    mask = n < N
    x = tl.load(scores_ptr + row * stride_sr + n, mask=mask, other=float("-inf")).to(tl.float32)  # [BLOCK]
    p = softmax(x)
    rest = tl.where(mask, p, -1.0)
    mass, best = 0.0, -1.0
    token = 0
    for k in range(0, K):
        value, index = tl.max(rest, axis=0, return_indices=True)
        live = (mass < top_p) & (value >= 0.0)
        noise = tl.load(nucleus_ptr + row * K + k, mask=live, other=1.0)
        score = tl.div_rn(value, noise)
        better = live & (score > best)
        best = tl.where(better, score, best)
        token = tl.where(better, index, token)
        mass = tl.where(live, mass + value, mass)
        rest = tl.where(n == index, -1.0, rest)
    w = tl.arange(0, BLOCK_W)
    recent = tl.load(recent_ptr + row * WINDOW + w, mask=w < WINDOW, other=-1)  # [BLOCK_W]
    again = tl.sum((recent == token).to(tl.int32), axis=0).to(tl.float32) >= repeats
    if EXCLUDE:
        p = softmax(tl.where(n == token, float("-inf"), x))
    noise = tl.load(whole_ptr + row * N + n, mask=mask, other=1.0)  # [BLOCK]
    other = tl.argmax(tl.where(mask, tl.div_rn(p, noise), -1.0), axis=0)
    tl.store(result_ptr + row * 2, tl.where(again, other, token).to(tl.int64))
    tl.store(result_ptr + row * 2 + 1, again.to(tl.int64))


def unsupported(
    scores: torch.Tensor,
    recent: torch.Tensor,
    nucleus_noise: torch.Tensor,
    whole_noise: torch.Tensor,
    top_p: float,
    repeats: float,
    exclude: bool,
) -> str | None:
    """Why a call is outside the envelope, or None."""
    if scores.dim() != 2 or scores.dtype not in FLOAT_TYPES or scores.stride(1) != 1:
        found = f"{scores.dtype} {tuple(scores.shape)} with strides {scores.stride()}"
        return f"scores must be fp32, fp16 or bf16 [rows, vocabulary] with unit inner stride, got {found}"
    rows, vocabulary = scores.shape
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        return f"a vocabulary of {vocabulary}, at most {MAX_VOCABULARY} is held in registers"
    if recent.dim() != 2 or recent.shape[0] != rows or recent.dtype != torch.int64 or not recent.is_contiguous():
        return f"recent must be contiguous int64 [{rows}, window], got {recent.dtype} {tuple(recent.shape)}"
    for noise in (nucleus_noise, whole_noise):
        if noise.dtype != torch.float32 or noise.dim() != 2 or noise.shape[0] != rows or not noise.is_contiguous():
            return f"noise must be contiguous fp32 [{rows}, .], got {noise.dtype} {tuple(noise.shape)}"
    if whole_noise.shape[1] != vocabulary or not 1 <= nucleus_noise.shape[1] <= MOST or recent.shape[1] > MOST:
        found = f"{whole_noise.shape[1]}, {nucleus_noise.shape[1]}, {recent.shape[1]}"
        return f"expected noise for {vocabulary} tokens, top_k of 1 to {MOST}, window up to {MOST}, got {found}"
    return None


def reference(
    scores: torch.Tensor,
    recent: torch.Tensor,
    nucleus_noise: torch.Tensor,
    whole_noise: torch.Tensor,
    top_p: float,
    repeats: float,
    exclude: bool,
) -> torch.Tensor:
    """The same choice in plain torch, without upstream's loop over elements and its waits; fp64 scores stay fp64."""
    x = scores.to(torch.promote_types(scores.dtype, torch.float32))
    p = x.softmax(dim=-1)
    values, indices = p.sort(dim=-1, descending=True, stable=True)
    k = min(nucleus_noise.shape[1], p.shape[1])
    mass, inside = torch.zeros_like(values[:, 0]), []
    for value in values[:, :k].unbind(1):
        inside.append(mass < top_p)
        mass = mass + value
    weighed = torch.where(torch.stack(inside, dim=1), values[:, :k] / nucleus_noise[:, :k], -1.0)
    token = indices.gather(1, weighed.argmax(dim=-1, keepdim=True))
    again = (recent == token).sum(dim=-1, keepdim=True) >= repeats
    if exclude:
        p = x.scatter(1, token, -torch.inf).softmax(dim=-1)
    other = (p / whole_noise).argmax(dim=-1, keepdim=True)
    return torch.cat([torch.where(again, other, token), again.to(torch.int64)], dim=-1)


@fused_op(
    "ras_sample",
    "(Tensor scores, Tensor recent, Tensor nucleus_noise, Tensor whole_noise, float top_p, float repeats, bool exclude)"
    " -> Tensor",
    reference=reference,
    unsupported=unsupported,
    fake=lambda scores, *_: scores.new_empty((scores.shape[0], 2), dtype=torch.int64),
)
def ras_sample(
    scores: torch.Tensor,
    recent: torch.Tensor,
    nucleus_noise: torch.Tensor,
    whole_noise: torch.Tensor,
    top_p: float,
    repeats: float,
    exclude: bool,
) -> torch.Tensor:
    """The next token of each row and whether it was drawn again, int64 [rows, 2]; formula in the module's docstring."""
    rows, vocabulary = scores.shape
    result = torch.empty((rows, 2), dtype=torch.int64, device=scores.device)
    if rows == 0:
        return result
    block = power_of_two(vocabulary)
    launch(
        _ras_sampler_kernel,
        rows,
        (scores, recent, nucleus_noise, whole_noise, result),
        (vocabulary, nucleus_noise.shape[1], recent.shape[1], scores.stride(0)),
        (top_p, repeats),
        (exclude, block, max(2, power_of_two(recent.shape[1]))),
        (("num_warps", warps_of(block)),),
    )
    return result
