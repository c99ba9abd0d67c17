"""Kokoro's decoder with valid lengths, replayed from CUDA graphs: Decoder.forward and Generator.forward.

Lengths are int64 [rows] on the device, valid frames of the decoder's input (25 ms each in Kokoro-82M). Two things keep
what lies behind a row's end out of the result: AdaIN takes its statistics over valid frames and leaves a zero tail,
and every convolution wider than one frame reads an input with a zero tail, as if padded by itself. The tail is cleared
where a bias would fill it: after the pooling convolution, before the upsampling ones and before conv_post. The
spectrum of the source and the waveform end at the row's own length (kernels/stft.py). Upstream's own module draws the
harmonic source, before and outside of the graph. Source: Decoder, Generator and AdainResBlk1d in kokoro/istftnet.py.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.weight_norm import WeightNorm

from voxfuse.fusions import adain_conv_block, spectral
from voxfuse.fusions._graph_arena import Arena, CudaArena
from voxfuse.fusions.adain_resblock import adain_leaky_relu_residual, adain_snake_resblock
from voxfuse.fusions.adain_resblock import unsupported as block_unsupported
from voxfuse.fusions.buckets import Axes, Buckets, Length, common_length
from voxfuse.fusions.folded import convolve, output_lengths
from voxfuse.fusions.graph_runner import CapturePolicy, GraphRunner
from voxfuse.kernels._op import TALLIES, Run, needs_dispatch
from voxfuse.kernels.istft import istft_polar
from voxfuse.kernels.mean_act import mean_act
from voxfuse.kernels.stft import stft_polar
from voxfuse.records import Fusion, FusionPattern

DECODER_GRAPH = Fusion(
    name="decoder_graph",
    stacks=("kokoro",),
    operations=("decoder", "generator", "stft", "istft"),
    contract="same-precision",
    envelope="fp32 on a CUDA GPU, inference without autocast, 1 to 8 rows, 2 to 2048 frames, buckets captured before",
    kernels=("adain", "conv1d", "moments", "adain_channels_last", "mean_act", "stft", "istft"),
    patterns=(FusionPattern(modules=("Decoder",)),),
)
BUCKETS = Buckets(shortest=2)  # of one frame AdaIN has no variance: upstream refuses it
MEMORY_CAP_BYTES = 4 * 2**30  # for each decoder
LAST_SLOPE, SLOPE = 0.01, 0.1  # leaky_relu before conv_post and before each upsampling convolution


def decode(
    decoder: Any,
    asr: torch.Tensor,
    f0: torch.Tensor,
    energy: torch.Tensor,
    style: torch.Tensor,
    source: torch.Tensor,
    lengths: torch.Tensor | None,
    run: Run,
) -> torch.Tensor:
    """Decoder.forward after its source: asr [rows, channels, frames], f0 and energy [rows, 2·frames], style [rows,
    style_dim], source [rows, samples] → [rows, 1, samples], zero behind each row's end."""
    curves = [
        convolve(decoder.F0_conv, f0.unsqueeze(1)),
        convolve(decoder.N_conv, energy.unsqueeze(1)),
    ]
    x = _leaky_relu_block(decoder.encode, torch.cat([asr, *curves], dim=1), style, lengths, run)
    asr_res = convolve(decoder.asr_res[0], asr)
    concatenate = True
    for block in decoder.decode:
        if concatenate:
            x = torch.cat([x, asr_res, *curves], dim=1)
        x = _leaky_relu_block(block, x, style, lengths, run)
        if block.upsample_type != "none":
            concatenate = False
            lengths = None if lengths is None else output_lengths(block.pool, lengths)
    return generate(decoder.generator, x, style, source, lengths, run)


def _leaky_relu_block(
    block: Any, x: torch.Tensor, style: torch.Tensor, lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    shortcut = block.upsample(x)
    if block.learned_sc:
        shortcut = convolve(block.conv1x1, shortcut)
    return (adain_leaky_relu_residual(block, x, style, run, lengths) + shortcut) * math.sqrt(0.5)


def generate(
    generator: Any,
    x: torch.Tensor,
    style: torch.Tensor,
    source: torch.Tensor,
    lengths: torch.Tensor | None,
    run: Run,
) -> torch.Tensor:
    """Generator.forward after its source: x [rows, channels, frames], style [rows, style_dim], source [rows, samples]
    → [rows, 1, samples], zero behind each row's end. ``lengths`` count frames of x."""
    stft, kernels = generator.stft, generator.num_kernels
    window = spectral.window_on(stft, x.device)
    samples = None if lengths is None else lengths * samples_per_frame(generator)
    harmonics = stft_polar(source, window, samples, stft.hop_length, run=run)
    parts: list[torch.Tensor] = [x]
    for stage, (up, noise_conv, noise_block) in enumerate(
        zip(generator.ups, generator.noise_convs, generator.noise_res, strict=True)
    ):
        x = convolve(up, _mean_act(parts, lengths, SLOPE, run))
        lengths = None if lengths is None else output_lengths(up, lengths)
        last = stage == generator.num_upsamples - 1
        if last:  # one frame more, reflected in front
            lengths = None if lengths is None else lengths + 1
        x_source = _snake_block(noise_block, convolve(noise_conv, harmonics), style, lengths, run)
        x = _reflected_sum(x, x_source) if last else x + x_source
        blocks = generator.resblocks[stage * kernels : (stage + 1) * kernels]
        parts = [_snake_block(block, x, style, lengths, run) for block in blocks]
    x = convolve(generator.conv_post, _mean_act(parts, lengths, LAST_SLOPE, run))
    bins = generator.post_n_fft // 2 + 1
    return istft_polar(x[:, :bins], x[:, bins:], window, lengths, stft.hop_length, "exp_sin", run=run).unsqueeze(1)


def _snake_block(
    block: Any, x: torch.Tensor, style: torch.Tensor, lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """By the fastest fusion that takes the block; the reference backend runs the chain nearest to upstream's."""
    if run.backend != "reference" and adain_conv_block.unsupported(block, x, style) is None:
        return adain_conv_block.adain_conv_block(block, x, style, lengths, run)
    return adain_snake_resblock(block, x, style, run, lengths)


def _reflected_sum(x: torch.Tensor, longer: torch.Tensor) -> torch.Tensor:
    """ReflectionPad1d((1, 0))(x) + longer, in the memory layout of ``longer``."""
    total = torch.empty_like(longer)
    torch.add(x, longer[:, :, 1:], out=total[:, :, 1:])
    torch.add(x[:, :, 1:2], longer[:, :, :1], out=total[:, :, :1])
    return total


def _mean_act(parts: list[torch.Tensor], lengths: torch.Tensor | None, slope: float, run: Run) -> torch.Tensor:
    """LeakyReLU of the mean, summed from the left; a zero tail."""
    total, *rest = parts
    while len(rest) > 2:
        total = total + rest.pop(0)
    second, third = (*rest, None, None)[:2]
    return mean_act(total, second, third, lengths, float(len(parts)), slope, run=run)


def draw_source(generator: Any, f0: torch.Tensor) -> torch.Tensor:
    """The harmonic source [rows, samples] of f0 [rows, frames], by upstream's module: its noise, in its order."""
    with torch.no_grad():
        source, _, _ = generator.m_source(generator.f0_upsamp(f0[:, None]).transpose(1, 2))
        return source.transpose(1, 2).squeeze(1)


def samples_per_frame(generator: Any) -> int:
    """Samples of the waveform for each frame of the generator's input."""
    return math.prod(up.stride[0] for up in generator.ups) * generator.stft.hop_length


def decoder_axes(decoder: Any) -> tuple[Axes, ...]:
    """Axes of asr, f0, energy, style, source and the waveform behind the rows; the length counts frames of asr."""
    samples = 2 * samples_per_frame(decoder.generator)
    channels, style = decoder.asr_res[0].in_channels, decoder.encode.norm1.fc.in_features
    return (channels, Length(1)), (Length(2),), (Length(2),), (style,), (Length(samples),), (1, Length(samples))


def generator_axes(generator: Any) -> tuple[Axes, ...]:
    """Axes of x, style, source and the waveform behind the rows; the length counts frames of x."""
    samples, style = samples_per_frame(generator), generator.resblocks[0].adain1[0].fc.in_features
    return (generator.ups[0].in_channels, Length(1)), (style,), (Length(samples),), (1, Length(samples))


class Runners:
    """The graph runners of one fusion, one for each decoder or generator that it served, beside the module.

    ``decoder`` and ``generator`` do what upstream's forward does, by replay, or give the reason why not; either is
    counted on the receipt. In the second case no random number was drawn.
    """

    def __init__(
        self, run: Run, capture: CapturePolicy = "warmup", arena: Callable[[torch.device], Arena] = CudaArena
    ) -> None:
        self._run, self._capture, self._arena = run, capture, arena
        self._held: WeakKeyDictionary[nn.Module, GraphRunner | str] = WeakKeyDictionary()
        self._lock = threading.Lock()

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
        return self._replay(decoder, decoder.generator, decode, decoder_axes, tensors, f0, lengths)

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
        return self._replay(generator, generator, generate, generator_axes, tensors, f0, lengths)

    def _replay(
        self,
        module: nn.Module,
        generator: Any,
        call: Callable[..., torch.Tensor],
        axes: Callable[[Any], tuple[Axes, ...]],
        tensors: tuple[torch.Tensor, ...],
        f0: torch.Tensor,
        lengths: torch.Tensor | Sequence[int] | None,
    ) -> torch.Tensor | str:
        reason = unsupported(generator, self._run, *tensors, f0)
        runner = reason or self._runner(module, call, axes)
        if isinstance(runner, str):
            TALLIES.add(self._run.receipt, fallback=runner)
            return runner
        length = common_length(tensors, runner.inputs[:-1])
        found = runner.find(tensors[0].shape[0], length, tensors[0].device, tensors[0].dtype)
        if isinstance(found, str):
            runner.count_miss(found)
            return found
        return runner.replay(found, *tensors, draw_source(generator, f0), lengths=lengths)

    def _runner(
        self, module: nn.Module, call: Callable[..., torch.Tensor], axes: Callable[[Any], tuple[Axes, ...]]
    ) -> GraphRunner | str:
        with self._lock:
            held = self._held.get(module)
            if held is None:
                with torch.no_grad():  # asked of its structure
                    held = foreign_part(module)
            if held is None:
                *inputs, output = axes(module)
                held = GraphRunner(
                    module,
                    functools.partial(call, run=self._run),
                    inputs,
                    output,
                    BUCKETS,
                    memory_cap_bytes=MEMORY_CAP_BYTES,
                    receipt=self._run.receipt,
                    capture=self._capture,
                    arena=self._arena,
                )
            self._held[module] = held
            return held


def unsupported(generator: Any, run: Run, *inputs: torch.Tensor) -> str | None:
    """Why a call of the decoder or generator with these inputs must run upstream's code, or None."""
    if type(generator.stft).__name__ != "TorchSTFT":
        return f"the model has {type(generator.stft).__name__} (disable_complex=True), which is left as it is"
    device = inputs[0].device
    if run.backend != "triton" or device.type != "cuda":
        return "graphs need a CUDA GPU and backend 'triton'"
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
    name: str
    part: Any
    for name, part in module.named_modules():
        if part is not module and (
            part._forward_hooks or set(map(type, part._forward_pre_hooks.values())) - {WeightNorm}
        ):
            return f"{name} has a forward hook, which a graph would not run"
        if hasattr(part, "adain1"):
            reason = block_unsupported(part, [*part.adain1, *part.adain2])
        elif hasattr(part, "upsample_type"):
            reason = block_unsupported(part, [part.norm1, part.norm2])
            if type(part.actv) is not nn.LeakyReLU:
                reason = f"the activation is {type(part.actv).__name__}, expected LeakyReLU"
        elif hasattr(part, "win_length"):
            reason = spectral.unsupported(part)
        else:
            continue
        if reason is not None:
            return f"{name}: {reason}"
    return None
