"""Kokoro's decoder with valid lengths, channels last from end to end: Decoder.forward and Generator.forward.

Lengths are int64 [rows] on the device, valid frames of the decoder's input (25 ms each in Kokoro-82M). Two things keep
what lies behind a row's end out of the result: AdaIN takes its statistics over valid frames and leaves a zero tail,
and every convolution wider than one frame reads an input with a zero tail, as if padded by itself. The tail is cleared
where a bias would fill it: after the pooling convolution, before the upsampling ones and before conv_post. The
spectrum of the source and the waveform end at the row's own length (kernels/stft.py). The harmonic source is drawn
before and outside. Source: Decoder, Generator and AdainResBlk1d in kokoro/istftnet.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from voxfuse.fusions import spectral
from voxfuse.fusions.adain_conv_block import adain_leaky_relu_block, adain_snake_block, padded_styles, snake_norms
from voxfuse.fusions.folded import convolve, output_lengths
from voxfuse.fusions.polyphase import upsample
from voxfuse.kernels._op import Run
from voxfuse.kernels.conv1d import STRATEGIES, packed_weight
from voxfuse.kernels.istft import istft_polar
from voxfuse.kernels.mean_act import mean_act
from voxfuse.kernels.moments import moments, residual_moments
from voxfuse.kernels.stft import stft_polar

LAST_SLOPE, SLOPE = 0.01, 0.1  # leaky_relu before conv_post and before each upsampling convolution
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
    norms = [(block.norm1, _padded(block.conv1.in_channels)) for block in blocks]
    pairs = [
        pair
        for first, block in zip(norms, blocks, strict=True)
        for pair in (first, (block.norm2, block.conv1.out_channels))
    ]
    projected = iter(padded_styles(decoder, pairs, style))
    curves = [
        convolve(decoder.F0_conv, f0.unsqueeze(1)).transpose(1, 2),
        convolve(decoder.N_conv, energy.unsqueeze(1)).transpose(1, 2),
    ]
    residue = convolve(decoder.asr_res[0], asr).transpose(1, 2)
    x = asr.transpose(1, 2)
    concatenated = curves
    for block in blocks:
        if concatenated:
            x = _concatenated([x, *concatenated])
        known = moments(x, lengths, x.shape[1], 1, run=run)
        x = adain_leaky_relu_block(block, x, known, projected, lengths, run)
        concatenated = [residue, *curves] if concatenated else []
        if block.upsample_type != "none":
            concatenated = []
            lengths = None if lengths is None else output_lengths(block.pool, lengths)
    return _generate(decoder.generator, x, style, source, lengths, run)


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
    return _generate(generator, x.transpose(1, 2).contiguous(), style, source, lengths, run)


def _generate(
    generator: Any,
    x: torch.Tensor,
    style: torch.Tensor,
    source: torch.Tensor,
    lengths: torch.Tensor | None,
    run: Run,
) -> torch.Tensor:
    """``generate`` of x [rows, frames, channels] contiguous."""
    stft, kernels = generator.stft, generator.num_kernels
    window = spectral.window_on(stft, x.device)
    samples = None if lengths is None else lengths * samples_per_frame(generator)
    harmonics = stft_polar(source, window, samples, stft.hop_length, run=run)
    projected = iter(_styles(generator, style))
    parts: list[torch.Tensor] = [x]
    for stage, (up, noise_conv, noise_block) in enumerate(
        zip(generator.ups, generator.noise_convs, generator.noise_res, strict=True)
    ):
        x = upsample(up, _mean_act(parts, lengths, SLOPE, run))
        lengths = None if lengths is None else output_lengths(up, lengths)
        if stage == generator.num_upsamples - 1:
            x = _reflected(x)
            lengths = None if lengths is None else lengths + 1
        frames = x.shape[1]
        noise = convolve(noise_conv, harmonics).transpose(1, 2)
        noise, known = residual_moments(noise, None, None, lengths, frames, 1, run=run)
        noise = adain_snake_block(noise_block, noise, known, projected, lengths, run)
        x, known = residual_moments(x, up.bias, noise, lengths, frames, 1, run=run)
        blocks = generator.resblocks[stage * kernels : (stage + 1) * kernels]
        parts = [adain_snake_block(block, x, known, projected, lengths, run) for block in blocks]
    post = generator.conv_post
    out_channels = -(-post.out_channels // OUT_MULTIPLE) * OUT_MULTIPLE
    x = STRATEGIES["taps_first"](
        _mean_act(parts, lengths, LAST_SLOPE, run), packed_weight(post, out_channels=out_channels), 1
    )
    spectrum = (x[:, :, : post.out_channels] + post.bias).transpose(1, 2)
    magnitude, phase = spectrum.split(generator.post_n_fft // 2 + 1, dim=1)
    return istft_polar(magnitude, phase, window, lengths, stft.hop_length, "exp_sin", run=run).unsqueeze(1)


def _styles(generator: Any, style: torch.Tensor) -> Iterator[torch.Tensor]:
    """The styles of all blocks in the order of their use."""
    kernels = generator.num_kernels
    blocks = []
    for stage, noise_block in enumerate(generator.noise_res):
        blocks += [noise_block, *generator.resblocks[stage * kernels : (stage + 1) * kernels]]
    norms = [(norm, norm.norm.num_features) for block in blocks for norm in snake_norms(block)]
    return iter(padded_styles(generator, norms, style))


def _reflected(x: torch.Tensor) -> torch.Tensor:
    """ReflectionPad1d((1, 0)) of what ``upsample`` gave, whose storage has room for a frame in front."""
    rows, frames, channels = x.shape
    longer = x.as_strided((rows, frames + 1, channels), x.stride(), x.storage_offset() - x.stride(1))
    longer[:, 0] = x[:, 1]
    return longer


def _mean_act(parts: list[torch.Tensor], lengths: torch.Tensor | None, slope: float, run: Run) -> torch.Tensor:
    """LeakyReLU of the mean, summed from the left; a zero tail. All [rows, frames, channels] contiguous."""
    total, *rest = parts
    while len(rest) > 2:
        total = total + rest.pop(0)
    first, second, third = (None if part is None else part.transpose(1, 2) for part in (total, *rest, None, None)[:3])
    return mean_act(first, second, third, lengths, float(len(parts)), slope, run=run).transpose(1, 2)


def draw_source(generator: Any, f0: torch.Tensor) -> torch.Tensor:
    """The harmonic source [rows, samples] of f0 [rows, frames], by upstream's module: its noise, in its order."""
    with torch.no_grad():
        source, _, _ = generator.m_source(generator.f0_upsamp(f0[:, None]).transpose(1, 2))
        return source.transpose(1, 2).squeeze(1)


def samples_per_frame(generator: Any) -> int:
    """Samples of the waveform for each frame of the generator's input."""
    return math.prod(up.stride[0] for up in generator.ups) * generator.stft.hop_length
