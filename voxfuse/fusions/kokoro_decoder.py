"""Kokoro's decoder with valid lengths, channels last from end to end: Decoder.forward and Generator.forward.

Lengths are int64 [rows] on the device, valid frames of the decoder's input (25 ms each in Kokoro-82M). Two things keep
what lies behind a row's end out of the result: AdaIN takes its statistics over valid frames and leaves a zero tail,
and every convolution wider than one frame reads an input with a zero tail, as if padded by itself. The tail is cleared
where a bias would fill it: after the pooling convolution, before the upsampling ones and before conv_post. The
spectrum of the source and the waveform end at the row's own length (kernels/stft.py). The harmonic source is drawn
before and outside. Source: Decoder, Generator and AdainResBlk1d in kokoro/istftnet.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from voxfuse.fusions import spectral
from voxfuse.fusions._fork import Fork
from voxfuse.fusions._stages import mean_activated, reflected
from voxfuse.fusions.adain_conv_block import adain_leaky_relu_block, adain_snake_block
from voxfuse.fusions.adain_resblock import padded_styles, snake_norms
from voxfuse.fusions.folded import convolve, output_lengths
from voxfuse.fusions.polyphase import upsample
from voxfuse.kernels._op import Run
from voxfuse.kernels.conv1d import STRATEGIES, packed_weight
from voxfuse.kernels.istft import istft_polar
from voxfuse.kernels.moments import moments, residual_moments
from voxfuse.kernels.stft import stft_polar

LAST_SLOPE, SLOPE = 0.01, 0.1  # leaky_relu before conv_post and before each upsampling convolution
BRANCH_SAMPLES = 400_000  # of rows · samples, up to which branches of the graph pay: 16 s
NOISE_LANE = 0  # of the branches (``_fork``); the parallel blocks have the lanes behind it
IN_MULTIPLE, OUT_MULTIPLE = 64, 8  # of channels: cuDNN's kernels for others take up to three times as long


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
    blocks = [decoder.encode, *decoder.decode]
    frames = lengths
    for block in blocks:
        if frames is not None and block.upsample_type != "none":
            frames = output_lengths(block.pool, frames)
    voice = _Voice(decoder.generator, style, source, frames, run)
    widths = [
        (norm, width)
        for block in blocks
        for norm, width in ((block.norm1, _padded(block.conv1.in_channels)), (block.norm2, block.conv1.out_channels))
    ]
    projected = iter(padded_styles(decoder, widths, style))
    curves = [
        convolve(decoder.F0_conv, f0.unsqueeze(1)).transpose(1, 2),
        convolve(decoder.N_conv, energy.unsqueeze(1)).transpose(1, 2),
    ]
    residue = convolve(decoder.asr_res[0], asr).transpose(1, 2)
    x = _concatenated([asr.transpose(1, 2), *curves])
    more = True
    for block in blocks:
        if block is not decoder.encode and more:
            x = _concatenated([x, residue, *curves])
        known = moments(x, lengths, x.shape[1], 1, run=run)
        x = adain_leaky_relu_block(block, x, known, projected, lengths, run)
        if block.upsample_type != "none":
            more = False
            lengths = None if lengths is None else output_lengths(block.pool, lengths)
    return voice.speak(x)


def _padded(channels: int) -> int:
    return -(-channels // IN_MULTIPLE) * IN_MULTIPLE


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    """Along the channels, zeros filling up to what ``_padded`` gives."""
    rows, frames, _ = parts[0].shape
    channels = sum(part.shape[2] for part in parts)
    spare = parts[0].new_zeros(()).expand(rows, frames, _padded(channels) - channels)
    return torch.cat([*parts, spare], dim=2)


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
    return _Voice(generator, style, source, lengths, run).speak(x.transpose(1, 2).contiguous())


class _Voice:
    """A generator at work on one source; what depends on the source and style alone begins with the construction."""

    def __init__(
        self, generator: Any, style: torch.Tensor, source: torch.Tensor, lengths: torch.Tensor | None, run: Run
    ) -> None:
        self._generator, self._lengths, self._run = generator, lengths, run
        stft = generator.stft
        self._apart = source.numel() <= BRANCH_SAMPLES
        self._window = spectral.window_on(stft, source.device)
        samples = None if lengths is None else lengths * samples_per_frame(generator)
        harmonics = stft_polar(source, self._window, samples, stft.hop_length, run=run)
        self._blocks = self._by_stage()
        norms = [(norm, norm.norm.num_features) for blocks in self._blocks for b in blocks for norm in snake_norms(b)]
        styles = iter(padded_styles(generator, norms, style))
        self._styles = [[[next(styles) for _ in snake_norms(block)] for block in blocks] for blocks in self._blocks]
        self._lengths_of, self._noises = [], []
        for stage, up in enumerate(generator.ups):
            lengths = None if lengths is None else output_lengths(up, lengths)
            if stage == generator.num_upsamples - 1:  # one frame more, reflected in front
                lengths = None if lengths is None else lengths + 1
            self._lengths_of.append(lengths)
            lane = NOISE_LANE if self._apart else None
            self._noises.append(Fork(functools.partial(self._noise, stage, harmonics), lane))

    def _by_stage(self) -> list[list[Any]]:
        """The blocks of each stage: the one for the source, then the parallel ones."""
        kernels, resblocks = self._generator.num_kernels, self._generator.resblocks
        noise_blocks = self._generator.noise_res
        return [[b, *resblocks[i * kernels : (i + 1) * kernels]] for i, b in enumerate(noise_blocks)]

    def _noise(self, stage: int, harmonics: torch.Tensor) -> torch.Tensor:
        noise = convolve(self._generator.noise_convs[stage], harmonics).transpose(1, 2)
        lengths = self._lengths_of[stage]
        noise, known = residual_moments(noise, None, None, lengths, noise.shape[1], 1, run=self._run)
        return self._block(stage, 0, noise, known)

    def _block(self, stage: int, index: int, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        block, styles = self._blocks[stage][index], iter(self._styles[stage][index])
        return adain_snake_block(block, x, known, styles, self._lengths_of[stage], self._run)

    def speak(self, x: torch.Tensor) -> torch.Tensor:
        """The waveform [rows, 1, samples] of x [rows, frames, channels] contiguous."""
        generator, run, lengths = self._generator, self._run, self._lengths
        parts = [x]
        for stage, up in enumerate(generator.ups):
            x = upsample(up, mean_activated(parts, lengths, SLOPE, run))
            if stage == generator.num_upsamples - 1:
                x = reflected(x)
            lengths = self._lengths_of[stage]
            x, known = residual_moments(x, up.bias, self._noises[stage].join(), lengths, x.shape[1], 1, run=run)
            first, *others = [
                functools.partial(self._block, stage, 1 + i, x, known) for i in range(generator.num_kernels)
            ]
            forks = [Fork(other, NOISE_LANE + i if self._apart else None) for i, other in enumerate(others, 1)]
            parts = [first(), *(fork.join() for fork in forks)]
        post = generator.conv_post
        weight = packed_weight(post, out_channels=-(-post.out_channels // OUT_MULTIPLE) * OUT_MULTIPLE)
        x = STRATEGIES["taps_first"](mean_activated(parts, lengths, LAST_SLOPE, run), weight, 1)
        spectrum = (x[:, :, : post.out_channels] + post.bias).transpose(1, 2)
        magnitude, phase = spectrum.split(generator.post_n_fft // 2 + 1, dim=1)
        hop = generator.stft.hop_length
        return istft_polar(magnitude, phase, self._window, lengths, hop, "exp_sin", run=run).unsqueeze(1)


def draw_source(generator: Any, f0: torch.Tensor) -> torch.Tensor:
    """The harmonic source [rows, samples] of f0 [rows, frames], by upstream's module: its noise, in its order."""
    with torch.no_grad():
        source, _, _ = generator.m_source(generator.f0_upsamp(f0[:, None]).transpose(1, 2))
        return source.transpose(1, 2).squeeze(1)


def samples_per_frame(generator: Any) -> int:
    """Samples of the waveform for each frame of the generator's input."""
    return math.prod(up.stride[0] for up in generator.ups) * generator.stft.hop_length
