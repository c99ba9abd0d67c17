"""Decode steps on upstream's own DynamicCache: a session of ``decode_graph`` behind each cache object.

Where upstream calls its decoder with one token for each row and a cache, ``CachedDecoding.step`` computes the token and
leaves the cache as upstream would: its tensors are then views of the session's static cache. Whatever upstream does
with a cache (ask for its length, crop it, copy it, go on with more tokens) works on what is really there; a cache whose
tensors are not those that it was given here was changed meanwhile, and is taken over anew. Its memory serves the next
generation once the cache and all views are gone.
Contract: same-precision, that of ``decode_step``. Rows are of one length, without padding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from voxfuse.fusions import decode_step
from voxfuse.fusions._decode_lanes import cuda_arena
from voxfuse.fusions._graph_arena import Arena
from voxfuse.fusions.decode_graph import DecodeRunner, DecodeSession
from voxfuse.fusions.graph_runner import CapturePolicy
from voxfuse.kernels._op import TALLIES, Run, needs_dispatch

REORDERED = "the cache was changed between two tokens, as beam search does: the rest of it runs upstream"


@dataclass(eq=False)
class _Held:
    """The session behind a cache, and the tensors that the cache was given last."""

    decoder: Any
    session: DecodeSession
    given: list[torch.Tensor]


class CachedDecoding:
    """The decode steps of one fusion: a runner beside each decoder, a session beside each cache, all held weakly.

    ``foreign``: what else rules a decoder out (a reason, or None), asked when a session starts; ``shadowed``: see
    ``decode_step.unsupported``. Safe from several threads; one cache at a time in one of them, as upstream.
    """

    def __init__(
        self,
        run: Run,
        capture: CapturePolicy = "warmup",
        *,
        foreign: Callable[[Any], str | None] = lambda decoder: None,
        shadowed: Callable[[nn.Module], bool] = decode_step.has_own_forward,
        arena: Callable[[torch.device], Arena] = cuda_arena,
    ) -> None:
        self._run, self._capture, self._foreign, self._shadowed, self._arena = run, capture, foreign, shadowed, arena
        self._runners: WeakKeyDictionary[nn.Module, DecodeRunner] = WeakKeyDictionary()
        self._held: WeakKeyDictionary[Any, _Held | str] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def runner(self, decoder: nn.Module) -> DecodeRunner:
        """The runner of a decoder, for its statistics and ``warm``."""
        with self._lock:
            if decoder not in self._runners:
                self._runners[decoder] = DecodeRunner(
                    decoder,
                    None,
                    self._run,
                    capture=self._capture,
                    arena=self._arena,
                    foreign=self._foreign,
                    shadowed=self._shadowed,
                )
            return self._runners[decoder]

    def step(self, decoder: Any, embeddings: torch.Tensor, past: Any) -> torch.Tensor | str:
        """The normed hidden state [rows, 1, hidden] of one token a row behind ``past``, which holds the token then.

        Otherwise the reason, counted, why upstream must compute it; the cache is as it was.
        """
        reason = decode_step.unknown_cache(past) or _unsuited(decoder, embeddings)
        held = None if reason is not None else self._session(decoder, past)
        if held is None or isinstance(held, str):
            return self._count(reason or str(held))
        try:
            hidden = held.session.step(embeddings)
        except torch.OutOfMemoryError as error:  # the cache would have grown; what it holds is whole
            self._hold(past, None)
            return self._count(f"no memory for a longer cache: {str(error).partition('. ')[0]}")
        held.given = held.session.contents()
        give(past, held.given)
        return hidden

    def count(self, reason: str) -> None:
        """Count a step that runs upstream, for a reason of the caller's."""
        TALLIES.add(self._run.receipt, fallback=reason)

    def _count(self, reason: str) -> str:
        self.count(reason)
        return reason

    def _session(self, decoder: Any, past: Any) -> _Held | str:
        """What serves a cache, begun where nothing does, or why nothing can."""
        with self._lock:
            held = self._held.get(past)
        if isinstance(held, str):
            return held
        tensors = decode_step.tensors(past)
        if not tensors or tensors[0].dim() != 4:
            return "the cache is empty or of another kind: there is nothing to go on from"
        rows, tokens = tensors[0].shape[0], tensors[0].shape[2]
        if held is not None and held.decoder is decoder:
            if len(tensors) == len(held.given) and all(map(_is, tensors, held.given)):
                limit = decoder.config.max_position_embeddings
                return held if tokens < limit else f"the model's {limit} positions are used up"
            left = held.given[0].shape[2]
            held.session.close()
            held.given.clear()  # so that its lane is nobody's
            self._hold(past, REORDERED if tokens == left else None)
            if tokens == left:
                return REORDERED
        try:
            session = self.runner(decoder).begin(past, [tokens] * rows)
        except ValueError as error:
            return f"the cache does not fit the model: {error}"
        if isinstance(session, str):
            return session
        held = _Held(decoder, session, tensors)
        self._hold(past, held)
        return held

    def _hold(self, past: Any, held: _Held | str | None) -> None:
        """Remember what serves a cache, or why nothing does, or nothing."""
        with self._lock:
            if held is None:
                self._held.pop(past, None)
            else:
                self._held[past] = held


def _is(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other


def give(past: Any, tensors: list[torch.Tensor]) -> None:
    """Put keys and values of each layer, one after the other, into an upstream cache."""
    keys, values = tensors[::2], tensors[1::2]
    if hasattr(past, "layers"):
        for layer, key, value in zip(past.layers, keys, values, strict=True):
            layer.keys, layer.values = key, value
        return
    past.key_cache[:], past.value_cache[:] = keys, values  # before transformers 4.54
    past._seen_tokens = keys[0].shape[2]


def _unsuited(decoder: Any, embeddings: torch.Tensor) -> str | None:
    """Why a call must run upstream, or None: what may change from one token to the next."""
    weight = decoder.norm.weight
    if embeddings.dim() != 3 or embeddings.dtype != weight.dtype or embeddings.device != weight.device:
        found = f"{embeddings.dtype} {list(embeddings.shape)} on {embeddings.device}"
        return f"expected embeddings [rows, 1, hidden] of {weight.dtype} on {weight.device}, got {found}"
    if needs_dispatch((embeddings,)):
        return "a dispatch mode is active, or the input is a tensor subclass"
    if decoder.training:
        return "the model is in training mode"
    if torch.is_autocast_enabled(weight.device.type):
        return "autocast is on"
    if torch.is_grad_enabled() and (embeddings.requires_grad or any(p.requires_grad for p in decoder.parameters())):
        return "a gradient is needed; call under torch.no_grad() or torch.inference_mode()"
    return None
