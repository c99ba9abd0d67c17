"""Decoding with ``decode_step`` replayed from CUDA graphs: a static cache and a graph for each generation under way.

A lane is a static cache of a bucket (256, 512, 1024, … tokens) with the graph captured on it, for a number of rows;
positions lie on the device, so that one graph serves every length. A ``DecodeSession`` (one generation) takes a free
lane of its bucket, copies upstream's prefill into it, and moves to the next bucket with its contents when it is full.
Lanes of ended sessions serve the next ones; what they hold is cleared only where a step reads behind a row's end.
Generations under way at once have lanes, memory pools and streams of their own. A session that finds no lane runs the
same step without a graph, counted with its reason.
Source: static caches and captured decode steps as in gpt-fast; StaticCache of transformers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import decode_step
from voxfuse.fusions._decode_lanes import SHORTEST, Lane, Lanes, bucket_of, cuda_arena
from voxfuse.fusions._graph_arena import Arena
from voxfuse.fusions.graph_runner import CapturePolicy, Statistics
from voxfuse.kernels._op import Run
from voxfuse.records import Fusion, FusionPattern

DECODE_GRAPH = Fusion(
    name="decode_graph",
    stacks=("cosyvoice2", "cosyvoice3", "chatterbox", "transformers"),
    operations=("decoder layers", "KV cache update", "attention over the cache"),
    contract="same-precision",
    envelope="fp32, fp16 or bf16 on a CUDA GPU, inference, Qwen2, Qwen3, Llama as upstream builds them, 1 to 64 rows",
    kernels=("rmsnorm", "qk_norm_rope", "gqa_decode", "swiglu", "skinny_gemm"),
    graph=True,
    patterns=tuple(FusionPattern(modules=(f"{family}DecoderLayer",)) for family in decode_step.DECODERS.values()),
)
MOST_ROWS = 64
MEMORY_CAP_BYTES = 8 * 2**30  # of the lanes of one decoder


class DecodeRunner:
    """Generations of one decoder (Qwen2Model, Qwen3Model or LlamaModel) and head (Linear or None), both held weakly.

    A step gives the head's output of the normed hidden state, or that state itself. ``capture``: "warmup" captures in
    ``warm`` and inside ``graph_runner.capturing`` only, "first_use" wherever no lane is free; what was captured once is
    captured again when more generations run at once. Steps count on ``run.receipt``, those without a graph with their
    reason. Replaced weights are seen when a session starts or grows. Above the memory cap free lanes leave by least
    recent use. Safe from several threads and streams. ``foreign``: what else rules a decoder out (a reason, or None);
    ``shadowed``: see ``decode_step.unsupported``.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: nn.Module | None,
        run: Run,
        *,
        capture: CapturePolicy = "warmup",
        memory_cap_bytes: int = MEMORY_CAP_BYTES,
        arena: Callable[[torch.device], Arena] = cuda_arena,
        foreign: Callable[[Any], str | None] = lambda decoder: None,
        shadowed: Callable[[nn.Module], bool] = decode_step.has_own_forward,
    ) -> None:
        self.run, self._foreign, self._shadowed = run, foreign, shadowed
        self.lanes = Lanes(decoder, head, run, capture, memory_cap_bytes, arena)

    @property
    def statistics(self) -> Statistics:
        """Captures, replays, misses by reason, evictions and bytes of the lanes."""
        return self.lanes.statistics

    def session(self, past: Any, lengths: Sequence[int]) -> DecodeSession | str:
        """A generation that goes on behind upstream's prefill, or the reason, counted, why it must run upstream.

        ``past`` and ``lengths``: see ``decode_step.adopt``. Raises ValueError where they do not fit the decoder.
        """
        found = self.begin(past, lengths)
        if isinstance(found, str):
            self.lanes.count_miss(found)
        return found

    def begin(self, past: Any, lengths: Sequence[int]) -> DecodeSession | str:
        """As ``session``, the reason not counted."""
        reason = decode_step.unknown_cache(past) or self.unsupported(len(lengths), max(lengths, default=0) + 1)
        if reason is not None:
            return reason
        try:
            return DecodeSession(self, past, list(lengths))
        except torch.OutOfMemoryError as error:
            return f"no memory for a static cache: {str(error).partition('. ')[0]}"

    def unsupported(self, rows: int, tokens: int) -> str | None:
        """Why a generation of so many rows and tokens must run upstream, or None."""
        decoder, head = self.lanes.decoder, self.lanes.head
        if not 1 <= rows <= MOST_ROWS:
            return f"{rows} rows: a session has 1 to {MOST_ROWS}"
        if tokens > decoder.config.max_position_embeddings:
            return f"{tokens} tokens are beyond the model's {decoder.config.max_position_embeddings} positions"
        if decoder.training:
            return "the model is in training mode"
        if torch.is_autocast_enabled(decoder.norm.weight.device.type):
            return "autocast is on"
        if head is not None and (type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks):
            return f"the head is {type(head).__name__} or has hooks, expected a plain Linear"
        return decode_step.unsupported(decoder, self._shadowed) or self._foreign(decoder)

    def warm(self, shapes: Iterable[tuple[int, int]], lanes: int = 1) -> None:
        """Capture ``lanes`` lanes (generations at once) for these (rows, tokens), and for the smaller buckets that a
        generation grows through; refused ones once more. What cannot be captured warns (RuntimeWarning)."""
        wanted: set[tuple[int, int]] = set()
        for rows, tokens in shapes:
            reason = self.unsupported(rows, tokens)
            if reason is not None:
                raise ValueError(f"{rows} rows of {tokens} tokens cannot be captured: {reason}")
            bits = range(SHORTEST.bit_length(), bucket_of(tokens).bit_length() + 1)
            wanted |= {(rows, 1 << (bit - 1)) for bit in bits}
        self.lanes.forget_refusals()
        for rows, bucket in sorted(wanted, reverse=True):
            for lane in [self.lanes.take(rows, bucket, warming=True) for _ in range(lanes)]:
                self.lanes.give_back(lane)


class DecodeSession:
    """One generation: ``step`` for each token, then ``close`` (or a with block, or garbage collection).

    Not for several threads at once; several sessions are. ``lengths``: tokens of each row in the cache, on the host.
    """

    def __init__(self, runner: DecodeRunner, past: Any, lengths: list[int]) -> None:
        self._runner, self.lengths = runner, lengths
        self._stopped: set[int] = set()
        lane = runner.lanes.take(len(lengths), bucket_of(max(lengths) + 1))
        self._enter(lane)
        try:
            with torch.no_grad(), lane.ordered():
                decode_step.adopt(lane.cache, past, lengths)
        except ValueError:
            self.close()
            raise

    @property
    def capacity(self) -> int:
        """Tokens that a row can have before the session moves to a larger cache."""
        return self._lane.cache.capacity

    @torch.no_grad()
    def step(self, inputs: torch.Tensor) -> torch.Tensor:
        """Decode one token of each row: [rows, 1, .], in memory of its own.

        ``inputs``: int64 ids [rows] or [rows, 1], or embeddings [rows, 1, hidden] of the weights' type. Raises
        ValueError where they are something else or the model's positions are used up, RuntimeError after ``close``.
        """
        if not self._finalizer.alive:
            raise RuntimeError("this session is closed: start another one for the next generation")
        running = [length for row, length in enumerate(self.lengths) if row not in self._stopped]
        positions = self._runner.lanes.decoder.config.max_position_embeddings
        if max(running, default=0) >= positions:
            raise ValueError(f"a row has {max(running)} tokens, and the model {positions} positions")
        if max(self.lengths) >= self.capacity:
            self._grow(max(self.lengths) + 1)
        lane, lanes = self._lane, self._runner.lanes
        with lane.ordered():
            self._embed(lane, inputs)
            if lane.graph is None or lane.output is None:
                output = lane.advance(lanes.decoder, lanes.head, self._runner.run)
            else:
                lane.graph.replay()
                output = lane.output.clone()
        lanes.count(lane)
        for row in range(len(self.lengths)):
            self.lengths[row] += row not in self._stopped
        return output

    def contents(self) -> list[torch.Tensor]:
        """Keys and values of each layer in turn, [rows, kv_heads, tokens, head_dim]: views of what the session holds.

        The rows must be of one length. A lane serves no other session as long as such views of it are there.
        """
        tokens = self.lengths[0]
        parts = zip(*(part[:, :, :, :tokens].unbind(0) for part in self._lane.cache), strict=True)
        return [tensor for pair in parts for tensor in pair]

    def stop(self, row: int) -> None:
        """Let a row that has finished rest: its length stays, and what ``step`` gives for it has no meaning."""
        self._stopped.add(row)
        with torch.no_grad(), self._lane.ordered():
            self._lane.active[row].fill_(0)  # an argument of the launch: no copy from the host to wait for

    def close(self) -> None:
        """Give the lane to the next session; repeating it does nothing."""
        self._finalizer()

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, lane: Lane) -> None:
        """Hold a lane, whose lengths become this session's."""
        self._lane = lane
        self._finalizer = weakref.finalize(self, self._runner.lanes.give_back, lane)
        self._finalizer.atexit = False
        with torch.no_grad(), lane.ordered():
            for row, length in enumerate(self.lengths):
                lane.lengths[row].fill_(length)
                lane.active[row].fill_(row not in self._stopped)
            if decode_step.reads_whole_cache(self._runner.lanes.decoder, lane.cache):
                for part in lane.cache:  # another session may have left NaN
                    part.zero_()

    def _grow(self, tokens: int) -> None:
        """Move to the bucket of so many tokens, with the contents."""
        old, leave = self._lane, self._finalizer
        self._enter(self._runner.lanes.take(len(self.lengths), bucket_of(tokens)))
        with old.ordered(), self._lane.ordered():
            for held, wider in zip(old.cache, self._lane.cache, strict=True):
                wider[:, :, :, : held.shape[3]] = held
        leave()

    def _embed(self, lane: Lane, inputs: torch.Tensor) -> None:
        rows = len(self.lengths)
        if inputs.dtype == torch.int64 and inputs.shape in ((rows,), (rows, 1)):
            weight = self._runner.lanes.decoder.embed_tokens.weight
            torch.index_select(weight, 0, inputs.reshape(-1), out=lane.embeddings.view(rows, -1))
        elif inputs.shape == lane.embeddings.shape and inputs.dtype == lane.embeddings.dtype:
            lane.embeddings.copy_(inputs)
        else:
            expected = f"int64 ids [{rows}] or {lane.embeddings.dtype} embeddings {list(lane.embeddings.shape)}"
            raise ValueError(f"expected {expected}, got {inputs.dtype} {list(inputs.shape)}")
