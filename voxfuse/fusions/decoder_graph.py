"""Kokoro's decoder replayed from CUDA graphs: Decoder.forward and Generator.forward.

One graph runner beside each decoder or generator (``graph_runner``) of the length-aware call in ``kokoro_decoder``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import adain_resblock, polyphase, spectral
from voxfuse.fusions._beside import Beside, Graphs
from voxfuse.fusions.buckets import Axes, Buckets, Length, common_length
from voxfuse.fusions.graph_runner import HOOKED, no_graphs
from voxfuse.fusions.kokoro_decoder import decode, draw_source, generate, samples_per_frame
from voxfuse.kernels._op import TALLIES, Run, needs_dispatch
from voxfuse.kernels._weight_norm import hooked
from voxfuse.kernels.conv1d import conv_unsupported
from voxfuse.records import Fusion, FusionPattern

DECODER_GRAPH = Fusion(
    name="decoder_graph",
    stacks=("kokoro",),
    operations=("decoder", "generator", "stft", "istft"),
    contract="same-precision",
    envelope="fp32 on a CUDA GPU, inference without autocast, 1 to 8 rows, 2 to 2048 frames, buckets captured before",
    kernels=("conv1d", "moments", "adain_channels_last", "mean_act", "stft", "istft", "sine_source"),
    graph=True,
    patterns=(FusionPattern(modules=("Decoder",)),),
)
BUCKETS = Buckets(shortest=2)  # of one frame AdaIN has no variance: upstream refuses it
MEMORY_CAP_BYTES = 4 * 2**30  # for each decoder
OURS = ("kokoro.", "torch.nn.", "voxfuse.")  # modules whose code a graph stands for
METHODS = {"forward", "_residual", "_shortcut", "transform", "inverse"}


def decoder_axes(decoder: Any) -> tuple[Axes, ...]:
    """Axes of asr, f0, energy, style, source and the waveform behind the rows; the length counts frames of asr."""
    samples = 2 * samples_per_frame(decoder.generator)
    channels, style = decoder.asr_res[0].in_channels, decoder.encode.norm1.fc.in_features
    return (channels, Length(1)), (Length(2),), (Length(2),), (style,), (Length(samples),), (1, Length(samples))


def generator_axes(generator: Any) -> tuple[Axes, ...]:
    """Axes of x, style, source and the waveform behind the rows; the length counts frames of x."""
    samples, style = samples_per_frame(generator), generator.resblocks[0].adain1[0].fc.in_features
    return (generator.ups[0].in_channels, Length(1)), (style,), (Length(samples),), (1, Length(samples))


class Runners(Beside):
    """The graphs of decoders and generators.

    ``decoder`` and ``generator`` do what upstream's forward does, by replay, or give the reason why not; either is
    counted on the receipt. In the second case no random number was drawn.
    """

    @staticmethod
    def _fault(module: nn.Module) -> str | None:
        return foreign_part(module)

    def _graphs(self, module: nn.Module) -> Graphs:
        whole = hasattr(module, "generator")
        call, axes = (decode, decoder_axes(module)) if whole else (generate, generator_axes(module))
        return Graphs(call, axes, BUCKETS, MEMORY_CAP_BYTES)

    def decoder(
        self,
        decoder: Any,
        asr: torch.Tensor,
        f0: torch.Tensor,
        energy: torch.Tensor,
        style: torch.Tensor,
        lengths: torch.Tensor | Sequence[int] | None = None,
    ) -> torch.Tensor | str:
        """Decoder.forward; ``lengths`` [rows]: valid frames of asr, for batches of mixed lengths.

        Upstream has no such thing. The source is drawn for all frames of all rows, so a row hears other noise in a
        batch than alone.
        """
        tensors = asr, f0, energy, style.expand(asr.shape[0], -1)
        return self._replay(decoder, decoder.generator, tensors, f0, lengths)

    def generator(
        self,
        generator: Any,
        x: torch.Tensor,
        style: torch.Tensor,
        f0: torch.Tensor,
        lengths: torch.Tensor | Sequence[int] | None = None,
    ) -> torch.Tensor | str:
        """Generator.forward; ``lengths`` [rows]: valid frames of x."""
        tensors = x, style.expand(x.shape[0], -1)
        return self._replay(generator, generator, tensors, f0, lengths)

    def _replay(
        self,
        module: nn.Module,
        generator: Any,
        tensors: tuple[torch.Tensor, ...],
        f0: torch.Tensor,
        lengths: torch.Tensor | Sequence[int] | None,
    ) -> torch.Tensor | str:
        reason = unsupported(generator, self._run, *tensors, f0)
        runner = reason or self._runner(module)
        if isinstance(runner, str):
            TALLIES.add(self._run.receipt, fallback=runner)
            return runner
        length = common_length(tensors, runner.inputs[:-1])
        found = runner.find(tensors[0].shape[0], length, tensors[0].device, tensors[0].dtype)
        if isinstance(found, str):
            runner.count_miss(found)
            return found
        return runner.replay(found, length, *tensors, draw_source(generator, f0), lengths=lengths)


def unsupported(generator: Any, run: Run, *inputs: torch.Tensor) -> str | None:
    """Why a call of the decoder or generator with these inputs must run upstream's code, or None."""
    if type(generator.stft).__name__ != "TorchSTFT":
        return f"the model has {type(generator.stft).__name__} (disable_complex=True), which is left as it is"
    device = inputs[0].device
    if (reason := no_graphs(run, device)) is not None:
        return reason
    if needs_dispatch(inputs):
        return "a dispatch mode is active, or an input is a tensor subclass"
    if any(tensor.dtype != torch.float32 or tensor.device != device for tensor in inputs):
        return f"expected fp32 on one device, got {', '.join(f'{t.dtype} on {t.device}' for t in inputs)}"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if generator.training:
        return "the model is in training mode"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *generator.parameters())):
        return "a gradient is needed; call under torch.no_grad() or torch.inference_mode()"
    return None


def foreign_part(module: nn.Module) -> str | None:
    """What in a decoder or generator is not as upstream builds it and so rules a graph out, or None."""
    parts: dict[str, Any] = dict(module.named_modules())
    generator: Any = getattr(module, "generator", module)
    called = {*generator.m_source.modules(), generator.f0_upsamp}  # as they are, for the source
    for name, part in parts.items():
        if part is not module and part not in called and (reason := replaced(part)) is not None:
            return f"{name}{reason}"
        if part is not module and hooked(part):
            return f"{name} {HOOKED}"
    faults = ((name, fault(part)) for name, part in parts.items())
    return next((f"{name or type(module).__name__}: {found}" for name, found in faults if found is not None), None)


def replaced(part: nn.Module) -> str | None:
    """What of a module's code is neither upstream's nor voxfuse's, to be read behind its name, or None."""
    kind = type(part)
    if not kind.__module__.startswith(OURS):
        return f" is {kind.__module__}.{kind.__qualname__}, whose code a graph would not run"
    for method in vars(part).keys() & METHODS:
        function = getattr(vars(part)[method], "__func__", vars(part)[method])
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith(OURS):
            return f".{method} was replaced on the instance"
    return None


def fault(part: Any) -> str | None:
    """Why one module is outside what ``kokoro_decoder`` computes, or None."""
    if hasattr(part, "adain1"):
        convolutions = [*part.convs1, *part.convs2]
        reason = adain_resblock.unsupported(part, [*part.adain1, *part.adain2])
    elif hasattr(part, "upsample_type"):
        convolutions = [part.conv1, part.conv2, *([part.conv1x1] if part.learned_sc else [])]
        reason = adain_resblock.unsupported(part, [part.norm1, part.norm2])
        if type(part.actv) is not nn.LeakyReLU:
            reason = f"the activation is {type(part.actv).__name__}, expected LeakyReLU"
        elif part.upsample_type != "none":
            reason = reason or polyphase.unsupported(part.pool)
    elif hasattr(part, "conv_post"):
        convolutions = [part.conv_post]
        reasons = [polyphase.unsupported(up) for up in part.ups]
        reason = next((reason for reason in reasons if reason is not None), None)
        if part.ups[-1].padding[0] < 1:
            reason = f"expected padding in the last upsampling convolution, got {part.ups[-1]}"
    else:
        return spectral.unsupported(part) if hasattr(part, "win_length") else None
    return reason or next((reason for conv in convolutions if (reason := conv_unsupported(conv)) is not None), None)
