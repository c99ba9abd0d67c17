"""HiFT's decode replayed from CUDA graphs: one graph runner beside each generator of the length-aware call.

The source comes from outside, so ``inference`` and ``cache_source`` stay upstream's. A graph keeps the settings that
its generator had at capture (slopes, limits); new weights are seen (``graph_runner``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import hift as hift_decoder
from voxfuse.fusions._beside import Beside, Graphs
from voxfuse.fusions._weights import Weights
from voxfuse.fusions.buckets import Axes, Buckets, Length
from voxfuse.fusions.graph_runner import HOOKED, OUTER_CAPTURE, no_graphs
from voxfuse.fusions.hift import look_ahead, samples_per_frame
from voxfuse.kernels._op import TALLIES, Run, needs_dispatch
from voxfuse.kernels._weight_norm import hooked
from voxfuse.records import Fusion, FusionPattern

HIFT_GRAPH = Fusion(
    name="hift_graph",
    stacks=("cosyvoice2", "cosyvoice3", "chatterbox"),
    operations=("decode", "stft", "istft"),
    contract="same-precision",
    envelope="fp32 on a CUDA GPU, inference without autocast; from graphs 1 to 16 rows of 1 to 2048 mel frames in "
    "buckets captured before, else the same code without a graph",
    kernels=("conv1d", "snake", "snake_conv_pair", "mean_act", "stft", "istft"),
    graph=True,
    patterns=(
        FusionPattern(modules=("HiFTGenerator",)),
        FusionPattern(modules=("CausalHiFTGenerator",)),
        FusionPattern(modules=("ResBlock", "Snake")),  # ``decode`` is no call of the generator: its blocks are seen
    ),
)
BUCKETS = Buckets(rows=tuple(range(1, 17)))
MEMORY_CAP_BYTES = 8 * 2**30  # for each generator: 16 rows of 12 s take 4.5 GiB
BEFORE = ("f0_predictor", "m_source")  # children whose work is done when ``decode`` is called


def axes(hift: Any) -> tuple[Axes, ...]:
    """Axes of mel, source, frames ahead (of a causal generator) and the waveform behind the rows; the length counts mel
    frames."""
    samples = samples_per_frame(hift)
    ahead: tuple[Axes, ...] = ((1,),) if look_ahead(hift) else ()
    return (hift.conv_pre.in_channels, Length(1)), (1, Length(samples)), *ahead, (Length(samples),)


def _decode(hift: Any, mel: torch.Tensor, source: torch.Tensor, *rest: torch.Tensor | None, run: Run) -> torch.Tensor:
    """What a graph captures; ``rest``: frames ahead [rows, 1] in fp32, as all inputs are, and the lengths."""
    *ahead, lengths = rest
    frames = ahead[0][:, 0].long() if ahead and ahead[0] is not None else None
    return hift_decoder.decode(hift, mel, source, lengths, run, frames)


class Runners(Beside):
    """The graphs of ``decode``."""

    @staticmethod
    def _fault(hift: nn.Module) -> str | None:
        return foreign_part(hift)

    def _graphs(self, hift: nn.Module) -> Graphs:
        return Graphs(_decode, axes(hift), BUCKETS, MEMORY_CAP_BYTES, _weights)

    def decode(
        self,
        hift: Any,
        mel: torch.Tensor,
        source: torch.Tensor,
        lengths: torch.Tensor | Sequence[int] | None = None,
        finalize: bool = True,
    ) -> torch.Tensor | str:
        """decode by replay, or where there is no graph (rows, length, memory, not warmed up) by the same code without
        one, or the reason why upstream's code must run; the last two are counted as fallbacks with their reason.

        mel [rows, bins, frames], source [rows, 1, samples]; ``lengths`` [rows]: valid mel frames, for batches of mixed
        lengths, each row then ending as alone, zero behind. Upstream has no such thing. ``finalize`` False, of a causal
        generator: as upstream's, for the longest row; a shorter one's last look_ahead + 1 valid frames are its caller's
        to leave out. One graph serves both.
        """
        reason = unsupported(hift, self._run, mel, source)
        held_back = 0 if finalize else look_ahead(hift) + 1
        if reason is None and 0 < mel.shape[2] <= held_back:
            reason = f"{held_back} frames or fewer, where more will follow, leave no audio"
        runner = reason or self._runner(hift)
        if isinstance(runner, str):
            TALLIES.add(self._run.receipt, fallback=runner)
            return runner
        ahead = [max(held_back - 1, 0)] if look_ahead(hift) else []
        audio = runner.attempt(mel.shape[2], mel, source, *ahead, lengths=lengths)
        if isinstance(audio, str):
            runner.count_miss(audio)
            if audio is OUTER_CAPTURE or self.ruled_out(hift) is not None:
                return audio
            numbers = [mel.new_full((mel.shape[0], 1), number) for number in ahead]
            with torch.no_grad():
                audio = runner.uncaptured((mel, source, *numbers), lengths)
        return audio[:, : audio.shape[1] - held_back * samples_per_frame(hift)] if held_back else audio


def _before(hift: nn.Module) -> list[str]:
    return [name for name in BEFORE if isinstance(getattr(hift, name, None), nn.Module)]


def _weights(hift: nn.Module) -> Weights:
    return Weights(hift, without=_before(hift))


def unsupported(hift: Any, run: Run, mel: torch.Tensor, source: torch.Tensor) -> str | None:
    """Why a call with these inputs must run upstream's code, or None."""
    return no_graphs(run, mel.device) or unsuited(hift, mel, source)


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
        if part is not hift and part not in left_out and hooked(part):
            return f"{name} {HOOKED}"
    return hift_decoder.fault(hift)
