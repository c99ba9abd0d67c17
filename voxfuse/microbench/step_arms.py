"""Arms of what stands in a captured decode step, or right before or behind it: heads turned and written into a static
cache, attention over that cache, embeddings of a frame's codebooks, and samplers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from voxfuse.kernels._attention import attention
from voxfuse.kernels._op import Run
from voxfuse.kernels.embedding_sum import embedding_sum
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope_cached import qk_norm_rope_cached
from voxfuse.kernels.ras_sampler import ras_sample
from voxfuse.kernels.sampler import draw, sample
from voxfuse.microbench.decode_arms import cached_rope_inputs
from voxfuse.microbench.operation import Operation, around
from voxfuse.microbench.peers import Peer
from voxfuse.microbench.timer import Call, Inputs
from voxfuse.records import Case


class StaticAttention:
    """Attention of one token over the ``held`` first keys of a cache, whose length the fused call reads on the device.

    Upstream's own cache has just so many keys; k and v are views of the static one of ``cache_len`` keys. The mask
    hides the rest of it: it is the peer's, who knows no lengths, and made once a step for all layers.
    """

    def reference(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Upstream's chain with repeated keys and values."""
        return attention(q, k, v, None, None, scale, False, 0)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """The fused call over all of the cache."""
        q, k, v, lengths, mask, scale = args
        y: torch.Tensor = gqa_decode(q, whole(k, mask), whole(v, mask), lengths, None, scale, False, 0, run=run)
        return y


def whole(part: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The static cache that a view of its held keys is of."""
    shape = (*part.shape[:2], mask.shape[3], part.shape[3])
    return part.as_strided(shape, part.stride())


def masked_sdpa(scaled_dot_product_attention: Callable[..., torch.Tensor]) -> Call:
    """SDPA over all of a static cache and its mask, a group's heads as tokens: no key is repeated, and backends that
    take a mask know no enable_gqa. What a captured step runs without ``gqa_decode``."""

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        rows, q_heads, _, head_dim = q.shape
        grouped = q.reshape(rows, k.shape[1], q_heads // k.shape[1], head_dim)
        k, v = whole(k, mask), whole(v, mask)
        y = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        return y.reshape(rows, 1, q_heads, head_dim)

    return call


def static_attention_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """q [rows, q_heads, 1, head_dim], held keys and values, lengths [rows], additive mask [rows, 1, 1, cache_len]."""
    tensors, device = case.tensors, generator.device
    rows, kv_heads, held, head_dim = tensors["k"].shape
    capacity = tensors["mask"].shape[3]
    cache = torch.randn(2, rows, kv_heads, capacity, head_dim, generator=generator, device=device)
    k, v = cache.to(getattr(torch, tensors["k"].dtype))[:, :, :, :held].unbind(0)
    lengths = torch.full((rows,), held, device=device)
    mask = torch.zeros(tensors["mask"].shape, dtype=k.dtype, device=device)
    mask[..., held:] = -torch.inf
    return around(0.0, 1.0, tensors["q"], generator), k, v, lengths, mask, float(case.parameters["scale"])


class EmbeddingSum:
    """Embeddings of codebooks, whose tables a call reads few rows of: they are held here, for the byte count's sake."""

    def __init__(self, case: Case, device: torch.device) -> None:
        _, codebooks, hidden = case.tensors["rows"].shape
        entries = int(case.parameters["entries"])
        generator = torch.Generator(device).manual_seed(0)
        table = torch.randn(codebooks * entries, hidden, generator=generator, device=device)
        self._table = table.to(getattr(torch, case.tensors["rows"].dtype))
        self._offsets = torch.arange(codebooks, device=device) * entries
        self._order = str(case.parameters["order"])

    def reference(self, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Upstream's chain over one table."""
        return embedding_sum.reference(ids, self._table.to(rows.dtype), self._offsets, self._order)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """The fused call."""
        y: torch.Tensor = embedding_sum(args[0], self._table, self._offsets, self._order, run=run)
        return y


def embedding_sum_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """ids [rows, codebooks], and ``rows`` [rows, codebooks, hidden] of one element: type and bytes of what is read."""
    signature, device = case.tensors["rows"], generator.device
    shape = case.tensors["ids"].shape
    ids = torch.randint(0, int(case.parameters["entries"]), shape, generator=generator, device=device)
    return ids, torch.ones(1, dtype=getattr(torch, signature.dtype), device=device).expand(signature.shape)


class UpstreamRas:
    """CosyVoice's ras_sampling of one row [1, vocabulary] with the noise of its draws given; the token and whether it
    was drawn again, where the host has them."""

    def reference(
        self,
        scores: torch.Tensor,
        recent: torch.Tensor,
        nucleus_noise: torch.Tensor,
        whole_noise: torch.Tensor,
        top_p: float,
        repeats: float,
        exclude: bool,
    ) -> torch.Tensor:
        """Upstream's walk over sorted probabilities, whose every comparison waits for the device."""
        (row,) = scores
        values, indices = row.softmax(dim=0).sort(descending=True, stable=True)
        mass: Any = 0.0
        nucleus: list[torch.Tensor] = []
        for index in range(len(indices)):
            if not (mass < top_p and len(nucleus) < nucleus_noise.shape[1]):
                break
            mass = mass + values[index]
            nucleus.append(values[index])
        weighed = torch.tensor(nucleus).to(row) / nucleus_noise[0, : len(nucleus)]
        token = int(indices[weighed.argmax()])
        again = int((recent == token).sum()) >= repeats
        if again:
            row = row.index_fill(0, recent.new_tensor([token]), -torch.inf) if exclude else row
            token = int((row.softmax(dim=0) / whole_noise[0]).argmax())
        return torch.tensor([[token, int(again)]])

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """The fused choice, on the device."""
        chosen: torch.Tensor = ras_sample(*args, run=run)
        return chosen


def ras_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Log-probabilities [1, vocabulary], the last tokens [1, window], noise of both draws, and upstream's settings."""
    tensors, settings = case.tensors, case.parameters
    scores = around(0.0, 3.0, tensors["scores"], generator).log_softmax(dim=-1)
    shape = tensors["recent"].shape
    recent = torch.randint(0, scores.shape[1], shape, generator=generator, device=generator.device)
    nucleus = draw(scores[:, : tensors["nucleus_noise"].shape[1]], generator)
    repeats = shape[1] * float(settings["tau_r"])
    return scores, recent, nucleus, draw(scores, generator), float(settings["top_p"]), repeats, True


def sample_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """logits, tokens seen, noise, temperature, top_k, top_p, penalty: the arguments of sample."""
    settings = case.parameters
    logits = around(0.0, 3.0, case.tensors["logits"], generator)
    seen = torch.rand(logits.shape, generator=generator, device=logits.device) < 0.05
    warpers = float(settings["temperature"]), int(settings["top_k"]), float(settings["top_p"])
    return logits, seen, draw(logits, generator), *warpers, float(settings["penalty"])


def on_host(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens as they are compared: every one must be the oracle's."""
    return tokens.double().cpu()


OPERATIONS: dict[str, Operation] = {
    "qk_norm_rope_cached": Operation(
        qk_norm_rope_cached, cached_rope_inputs, "a norm with rotary embedding and eager's roundings into a cache"
    ),
    "static_attention": Operation(
        StaticAttention(),
        static_attention_inputs,
        "attention of a token over a static cache in this layout",
        (Peer("torch", "torch.nn.functional:scaled_dot_product_attention", masked_sdpa),),
    ),
    "embedding_sum": Operation(EmbeddingSum, embedding_sum_inputs, "a sum of embeddings", of_modules=True),
    "ras_sampling": Operation(
        UpstreamRas(),
        ras_inputs,
        "this sampling",
        timed="wall",
        compared=on_host,
        compilable=ras_sample.reference,
    ),
    "sample": Operation(sample, sample_inputs, "upstream's sampling of these draws", compared=on_host),
}
