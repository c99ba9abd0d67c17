"""f0 and source of HiFT replayed from CUDA graphs: what ``inference`` does before ``decode``.

A graph of its own, since ``cache_source`` is written over the source in between. Random numbers are drawn before each
replay and go in as inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import hift_graph, hift_source
from voxfuse.fusions._beside import Beside, Graphs
from voxfuse.fusions._weights import Weights
from voxfuse.fusions.buckets import Axes, Length
from voxfuse.fusions.graph_runner import HOOKED, no_graphs
from voxfuse.fusions.hift_graph import BEFORE
from voxfuse.kernels._op import TALLIES, Run, needs_dispatch
from voxfuse.kernels._weight_norm import hooked
from voxfuse.records import Fusion, FusionPattern

HIFT_SOURCE_GRAPH = Fusion(
    name="hift_source_graph",
    stacks=("cosyvoice2", "cosyvoice3", "chatterbox"),
    operations=("conv1d", "elu", "interpolate", "cumsum", "sin", "noise", "linear", "tanh"),
    contract="same-precision",
    envelope="fp32 mel on a CUDA GPU, inference without autocast, 1 to 16 rows, 1 to 2048 mel frames, buckets captured "
    "before",
    kernels=("sine_source", "stepped_source", "held_source"),
    graph=True,
    patterns=(FusionPattern(modules=("ConvRNNF0Predictor",)), FusionPattern(modules=("CausalConvRNNF0Predictor",))),
)


def axes(hift: Any) -> tuple[Axes, ...]:
    """Axes of mel, what was drawn, and the source behind the rows; the length counts mel frames."""
    _, harmonics, samples = hift_source.noise_shape(hift, 1, 1)
    mel, noise = (hift.conv_pre.in_channels, Length(1)), (harmonics, Length(samples))
    drawn: dict[str, tuple[Axes, ...]] = {
        hift_source.CAUSAL: (),
        hift_source.INTERPOLATED: (noise,),
        hift_source.STEPPED: (noise, (harmonics,)),
    }
    return mel, *drawn[hift_source.kind_of(hift.m_source.l_sin_gen)], (1, Length(samples))


def _source(hift: Any, mel: torch.Tensor, *rest: Any, run: Run) -> torch.Tensor:
    """What a graph captures; ``rest``: what was drawn, and the lengths."""
    *drawn, lengths = rest
    f0 = hift_source.frequencies(hift.f0_predictor, mel, lengths).to(mel.dtype)
    return hift_source.harmonic_source(hift, f0, drawn, lengths, run).unsqueeze(1)


class SourceRunners(Beside):
    """The graphs of f0 and source."""

    @staticmethod
    def _fault(hift: nn.Module) -> str | None:
        return foreign_part(hift)

    def _graphs(self, hift: nn.Module) -> Graphs:
        return Graphs(_source, axes(hift), hift_graph.BUCKETS, hift_graph.MEMORY_CAP_BYTES, _weights)

    def source(
        self, hift: Any, mel: torch.Tensor, lengths: torch.Tensor | Sequence[int] | None = None, ahead: int = 0
    ) -> torch.Tensor | str:
        """The source [rows, 1, samples] of mel [rows, bins, frames] by replay, or the reason why not, counted; in the
        second case no random number was drawn.

        ``lengths`` [rows]: valid mel frames of each row. ``ahead``: how many of the last frames a causal predictor only
        looks at (``finalize=False``); they have no samples.
        """
        reason = unsupported(hift, self._run, mel, ahead)
        runner = reason or self._runner(hift)
        if isinstance(runner, str):
            TALLIES.add(self._run.receipt, fallback=runner)
            return runner
        rows, _, frames = mel.shape
        found = runner.find(rows, frames, mel.device, mel.dtype)
        if isinstance(found, str):
            runner.count_miss(found)
            return found
        drawn = hift_source.draw(hift, rows, frames, mel.device)
        source = runner.replay(found, frames, mel, *drawn, lengths=lengths)
        _, _, samples = hift_source.noise_shape(hift, 1, frames - ahead)
        return source[:, :, :samples]


def unsupported(hift: Any, run: Run, mel: torch.Tensor, ahead: int) -> str | None:
    """Why a call with this mel must run upstream's code, or None."""
    return no_graphs(run, mel.device) or unsuited(hift, mel, ahead)


def unsuited(hift: Any, mel: torch.Tensor, ahead: int) -> str | None:
    """Why this mel is outside what a graph takes on any device, or None."""
    predictor, linear = hift.f0_predictor, hift.m_source.l_linear
    if needs_dispatch((mel,)):
        return "a dispatch mode is active, or the mel is a tensor subclass"
    if mel.dtype != torch.float32 or linear.weight.dtype != torch.float32:
        return f"expected mel and source in fp32, got {mel.dtype} and {linear.weight.dtype}"
    if mel.dim() != 3 or mel.shape[1] != hift.conv_pre.in_channels:
        return f"mel must be [rows, {hift.conv_pre.in_channels}, frames], got {tuple(mel.shape)}"
    if 0 < mel.shape[2] <= ahead:
        return f"{ahead} frames or fewer, where more will follow, leave no f0"
    sines = hift.m_source.l_sin_gen
    if hift_source.kind_of(sines) == hift_source.CAUSAL:
        samples = mel.shape[2] * int(hift.f0_upsamp.scale_factor)
        if samples > (drawn := sines.sine_waves.shape[1]):
            return f"{samples} samples, and the source drew noise for {drawn}"
    if torch.is_autocast_enabled(mel.device.type):
        return "autocast is on"
    if hift.training or predictor.training:
        return "the model is in training mode"
    if torch.is_grad_enabled():
        parts = mel, *predictor.parameters(), *hift.m_source.parameters()
        if any(tensor.requires_grad for tensor in parts):
            return "a gradient is needed; call under torch.no_grad() or torch.inference_mode()"
    return None


def foreign_part(hift: Any) -> str | None:
    """What in a generator's predictor and source is not as upstream builds it and so rules a graph out, or None."""
    for child in (*BEFORE, "f0_upsamp"):
        for name, part in getattr(hift, child).named_modules(prefix=child):
            if hooked(part):
                return f"{name} {HOOKED}"
    return hift_source.fault(hift)


def _weights(hift: nn.Module) -> Weights:
    others = [name for name, child in hift.named_children() if name not in BEFORE]
    return Weights(hift, without=others)
