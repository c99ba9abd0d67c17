"""Attention of a captured step over a static cache, by ``gqa_decode`` or, where SDPA was measured to be faster, by it:
nowhere yet (``_measured.STATIC_GQA_WINS``).

``gqa_decode`` reads the valid length of each row on the device and nothing behind it. SDPA knows no lengths: one graph
for every length means all of the cache and a mask, so what lies behind a row's end must be finite there (a weight of
zero times NaN is NaN). A group's query heads are SDPA's tokens: no key is repeated, and its backends that take a mask
know no ``enable_gqa``. The mask is made once a step for all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from voxfuse.kernels._measured import static_gqa_wins
from voxfuse.kernels._op import TALLIES, Run
from voxfuse.kernels.gqa_decode import gqa_decode


def whole_cache_is_read(q_heads: int, keys: torch.Tensor) -> bool:
    """Whether SDPA attends over a static cache [rows, kv_heads, capacity, head_dim], which has to be finite then."""
    return not static_gqa_wins(q_heads, keys)


def hidden_behind(valid: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The additive mask [rows, 1, 1, capacity] of the keys' type that hides what lies behind ``valid`` int64 [rows]."""
    capacity = keys.shape[2]
    seen = torch.arange(capacity, device=valid.device) < valid.view(-1, 1, 1, 1)
    return torch.zeros_like(seen, dtype=keys.dtype).masked_fill_(~seen, -torch.inf)


def attend_cache(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    window: int,
    run: Run,
) -> torch.Tensor:
    """Attention of q [rows, 1, q_heads, head_dim] over the cache, [rows, 1, q_heads, head_dim].

    ``mask``: see ``hidden_behind``; None, or a ``window`` above 0, takes ``gqa_decode``.
    """
    if mask is None or window:
        y: torch.Tensor = gqa_decode(q.transpose(1, 2), keys, values, valid, None, scale, False, window, run=run)
        return y
    TALLIES.add(run.receipt)
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)
