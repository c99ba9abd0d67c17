"""HiFTGenerator.decode replayed from CUDA graphs: one graph runner beside each generator of the length-aware call.

The source comes from outside, so ``inference`` and ``cache_source`` stay upstream's. A graph keeps the settings that
its generator had at capture (slopes, limits); new weights are seen (``graph_runner``).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from voxfuse.fusions import hift as hift_decoder
from voxfuse.fusions._graph_arena import Arena, CudaArena
from voxfuse.fusions._weights import Weights
from voxfuse.fusions.buckets import Axes, Buckets, Length
from voxfuse.fusions.graph_runner import CapturePolicy, GraphRunner
from voxfuse.fusions.hift import samples_per_frame
from voxfuse.kernels._op import TALLIES, Run, needs_dispatch
from voxfuse.records import Fusion, FusionPattern

HIFT_GRAPH = Fusion(
    name="hift_graph",
    stacks=("cosyvoice2", "chatterbox"),
    operations=("decode", "stft", "istft"),
    contract="same-precision",
    envelope="fp32 on a CUDA GPU, inference without autocast, 1 to 16 rows, 1 to 2048 mel frames, buckets captured "
    "before",
    kernels=("conv1d", "snake", "mean_act", "stft", "istft"),
    graph=True,
    patterns=(FusionPattern(modules=("HiFTGenerator",)),),
)
BUCKETS = Buckets(rows=tuple(range(1, 17)))
MEMORY_CAP_BYTES = 8 * 2**30  # for each generator: 16 rows of 12 s take 4.5 GiB
BEFORE = ("f0_predictor", "m_source")  # children whose work is done when ``decode`` is called


def axes(hift: Any) -> tuple[Axes, ...]:
    """Axes of mel, source and the waveform behind the rows; the length counts mel frames."""
    samples = samples_per_frame(hift)
    return (hift.conv_pre.in_channels, Length(1)), (1, Length(samples)), (Length(samples),)


def _none_foreign(_: nn.Module) -> None:
    return None


class Runners:
    """The graph runners of one fusion, one for each generator that it served, beside the module.

    ``foreign`` says why a generator is not upstream's own as it was tested, or None; asked once a generator.
    """

    def __init__(
        self,
        run: Run,
        capture: CapturePolicy = "warmup",
        arena: Callable[[torch.device], Arena] = CudaArena,
        foreign: Callable[[nn.Module], str | None] = _none_foreign,
    ) -> None:
        self._run, self._capture, self._arena, self._foreign = run, capture, arena, foreign
        self._held: WeakKeyDictionary[nn.Module, GraphRunner] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def decode(
        self,
        hift: Any,
        mel: torch.Tensor,
        source: torch.Tensor,
        lengths: torch.Tensor | Sequence[int] | None = None,
    ) -> torch.Tensor | str:
        """HiFTGenerator.decode by replay, or the reason why not; either is counted on the receipt.

        mel [rows, bins, frames], source [rows, 1, samples]; ``lengths`` [rows]: valid mel frames, for batches of mixed
        lengths, each row then ending as alone, zero behind. Upstream has no such thing.
        """
        reason = unsupported(hift, self._run, mel, source)
        runner = reason or self._runner(hift)
        if isinstance(runner, str):
            TALLIES.add(self._run.receipt, fallback=runner)
            return runner
        found = runner.find(mel.shape[0], mel.shape[2], mel.device, mel.dtype)
        if isinstance(found, str):
            runner.count_miss(found)
            return found
        return runner.replay(found, mel, source, lengths=lengths)

    def _runner(self, hift: nn.Module) -> GraphRunner | str:
        with self._lock:
            held = self._held.get(hift)
            if held is None:
                with torch.no_grad():  # asked of its structure
                    reason = self._foreign(hift) or foreign_part(hift)
                if reason is not None:
                    return reason
                *inputs, output = axes(hift)
                held = self._held[hift] = GraphRunner(
                    hift,
                    functools.partial(hift_decoder.decode, run=self._run),
                    inputs,
                    output,
                    BUCKETS,
                    memory_cap_bytes=MEMORY_CAP_BYTES,
                    receipt=self._run.receipt,
                    capture=self._capture,
                    arena=self._arena,
                    weights=_weights,
                )
            return held


def _before(hift: nn.Module) -> list[str]:
    return [name for name in BEFORE if isinstance(getattr(hift, name, None), nn.Module)]


def _weights(hift: nn.Module) -> Weights:
    return Weights(hift, without=_before(hift))


def unsupported(hift: Any, run: Run, mel: torch.Tensor, source: torch.Tensor) -> str | None:
    """Why a call with these inputs must run upstream's code, or None."""
    device = mel.device
    if run.backend != "triton" or device.type != "cuda":
        return "graphs need a CUDA GPU and backend 'triton'"
    return unsuited(hift, mel, source)


def unsuited(hift: Any, mel: torch.Tensor, source: torch.Tensor) -> str | None:
    """Why these inputs are outside what a graph takes on any device, or None."""
    tensors = mel, source
    if needs_dispatch(tensors):
        return "a dispatch mode is active, or an input is a tensor subclass"
    if any(tensor.dtype != torch.float32 or tensor.device != mel.device for tensor in tensors):
        return f"expected fp32 on one device, got {', '.join(f'{t.dtype} on {t.device}' for t in tensors)}"
    if hift.conv_post.bias.dtype != torch.float32:
        return f"expected weights in fp32, got {hift.conv_post.bias.dtype}"
    if mel.dim() != 3 or mel.shape[1] != hift.conv_pre.in_channels:
        return f"mel must be [rows, {hift.conv_pre.in_channels}, frames], got {tuple(mel.shape)}"
    expected = mel.shape[0], 1, mel.shape[2] * samples_per_frame(hift)
    if source.shape != expected:
        return f"the source must be {list(expected)}, got {tuple(source.shape)}"
    if torch.is_autocast_enabled(mel.device.type):
        return "autocast is on"
    if hift.training:
        return "the model is in training mode"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *hift.parameters())):
        return "a gradient is needed; call under torch.no_grad() or torch.inference_mode()"
    return None


def foreign_part(hift: Any) -> str | None:
    """What in a generator is not as upstream builds it and so rules a graph out, or None."""
    left_out = {part for child in _before(hift) for part in getattr(hift, child).modules()}
    for name, part in hift.named_modules():
        pre_hooks = set(map(type, part._forward_pre_hooks.values())) - {WeightNorm}
        if part is not hift and part not in left_out and (part._forward_hooks or pre_hooks):
            return f"{name} has a forward hook, which a graph would not run"
    return hift_decoder.fault(hift)
