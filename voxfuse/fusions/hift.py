"""HiFT's decoder with valid lengths, channels last from end to end: HiFTGenerator.decode of CosyVoice2 and Chatterbox,
CausalHiFTGenerator.decode of CosyVoice3.

Lengths are int64 [rows] on the device, valid mel frames (20 ms each at the released shapes). What lies behind a row's
end stays out of the result: every convolution wider than one frame reads an input with a zero tail, as if padded by
itself, and the spectrum of the source and the waveform end at the row's own length (kernels/stft.py). Padding of causal
convolutions is cuDNN's or written by what makes their input, no copy (kernels/_conv_plan.py). The source is given from
outside: upstream draws its noise, and mends it with ``cache_source``, before.
Source: decode in cosyvoice/hifigan/generator.py and chatterbox/models/s3gen/hifigan.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import _source_downs, polyphase, spectral
from voxfuse.fusions._fork import Fork
from voxfuse.fusions._source_downs import downsampled
from voxfuse.fusions._stages import mean_activated, reflected
from voxfuse.fusions.polyphase import factor, upsample
from voxfuse.fusions.snake_conv_block import block_fault, snake_block
from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels._phases import PLAIN
from voxfuse.kernels._weight_norm import class_of
from voxfuse.kernels.conv1d import conv_unsupported, convolved_plain, packed_weight
from voxfuse.kernels.istft import istft_limited
from voxfuse.kernels.snake import snake
from voxfuse.kernels.stft import stft_complex

LAST_SLOPE = 0.01  # of the leaky_relu before conv_post; the others have ``lrelu_slope``
MAX_MAGNITUDE = 100.0  # upstream's clip in _istft
BRANCH_SAMPLES = 400_000  # of rows · samples, up to which branches of the graph pay (as for Kokoro): 16 s
SOURCE_LANE = 0  # of the branches (``_fork``); the parallel blocks have the lanes behind it
OUT_MULTIPLE = 8  # of channels: cuDNN's kernels for others take up to three times as long


def samples_per_frame(hift: Any) -> int:
    """Samples of the waveform for each mel frame."""
    return math.prod(map(factor, hift.ups)) * hift.istft_params["hop_len"]


def look_ahead(hift: Any) -> int:
    """How many mel frames a causal generator looks ahead; 0 of one that is not causal."""
    return getattr(hift, "conv_pre_look_right", 0)


def decode(
    hift: Any,
    mel: torch.Tensor,
    source: torch.Tensor,
    lengths: torch.Tensor | None,
    run: Run,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """decode: mel [rows, bins, frames], source [rows, 1, samples] → [rows, samples], zero behind each row's end. The
    module must be without ``fault``.

    ``ahead`` [rows], integers: how many of a row's valid frames are only looked at by a causal ``conv_pre``, and not
    spoken (what ``finalize=False`` does; the frame more that upstream then holds back is the caller's to cut off).
    """
    hop = hift.istft_params["hop_len"]
    window = pack(hift, f"window on {mel.device}", [hift.stft_window], lambda: hift.stft_window.to(mel.device))
    samples = None if lengths is None else lengths * samples_per_frame(hift)
    lanes = [SOURCE_LANE + i if source.numel() <= BRANCH_SAMPLES else None for i in range(hift.num_kernels)]
    frames = source.shape[2] // hop + 1
    room = _source_downs.room(hift.source_downs, frames)
    spectrum = stft_complex(source.squeeze(1), window, samples, hop, *room, run=run)
    spoken = lengths if ahead is None else (mel.shape[2] if lengths is None else lengths) - ahead
    ends, sources = [], []
    end = spoken
    for stage, up in enumerate(hift.ups):
        end = None if end is None else end * factor(up)
        if stage == hift.num_upsamples - 1:  # one frame more, reflected in front
            end = None if end is None else end + 1
        ends.append(end)
        branch = functools.partial(_source_branch, hift, stage, spectrum, room.lead, frames, end, run)
        sources.append(Fork(branch, lanes[0]))
    parts, slope = [_mel_features(hift, mel, lengths, spoken, run)], float(hift.lrelu_slope)
    for stage, up in enumerate(hift.ups):
        x = upsample(up, mean_activated(parts, spoken, slope, run))
        if stage == hift.num_upsamples - 1:
            x = reflected(x)
        spoken = ends[stage]
        x, _ = snake(x, up.bias, sources[stage].join(), None, spoken, x.shape[1], 1, *PLAIN, True, run=run)
        blocks = hift.resblocks[stage * hift.num_kernels : (stage + 1) * hift.num_kernels]
        first, *others = [functools.partial(snake_block, block, x, spoken, run) for block in blocks]
        forks = [Fork(other, lane) for other, lane in zip(others, lanes[1:], strict=True)]
        parts = [first(), *(fork.join() for fork in forks)]
    post = hift.conv_post
    weight = packed_weight(post, out_channels=-(-post.out_channels // OUT_MULTIPLE) * OUT_MULTIPLE)
    x = convolved_plain(post, mean_activated(parts, spoken, LAST_SLOPE, run), weight, "taps_first")
    x = (x[:, :, : post.out_channels] + post.bias).transpose(1, 2)
    magnitude, phase = x.split(hift.istft_params["n_fft"] // 2 + 1, dim=1)
    return istft_limited(magnitude, phase, window, spoken, hop, MAX_MAGNITUDE, float(hift.audio_limit), run=run)


def _mel_features(
    hift: Any, mel: torch.Tensor, lengths: torch.Tensor | None, spoken: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """conv_pre of mel [rows, bins, frames], channels last, the tail zero before and behind."""
    pre, frames = hift.conv_pre, mel.shape[2]
    x, _ = snake(mel.transpose(1, 2), None, None, None, lengths, frames, 1, *PLAIN, True, run=run)
    x = convolved_plain(pre, x, packed_weight(pre), "taps_last")
    x, _ = snake(x, pre.bias, None, None, spoken, frames, 1, *PLAIN, True, run=run)
    return x


def _source_branch(
    hift: Any, stage: int, spectrum: torch.Tensor, lead: int, frames: int, lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """What a stage adds of the source, of a spectrum of ``frames`` frames behind ``lead``: [rows, frames', channels]
    contiguous."""
    down = hift.source_downs[stage]
    x = downsampled(down, spectrum, lead, frames)
    x, _ = snake(x, down.bias, None, None, lengths, x.shape[1], 1, *PLAIN, True, run=run)
    return snake_block(hift.source_resblocks[stage], x, lengths, run)


def fault(hift: Any) -> str | None:
    """What in a HiFTGenerator is outside what ``decode`` computes, or None: asked of its structure."""
    n_fft, hop = hift.istft_params["n_fft"], hift.istft_params["hop_len"]
    stages, kernels = hift.num_upsamples, hift.num_kernels
    counts = len(hift.ups), len(hift.source_downs), len(hift.source_resblocks), len(hift.resblocks)
    if min(stages, kernels) < 1 or counts != (stages, stages, stages, stages * kernels):
        return f"expected {stages} stages of {kernels} blocks, got {counts} parts"
    if (pad := hift.reflection_pad.padding) != (1, 0) or type(hift.reflection_pad) is not nn.ReflectionPad1d:
        return f"expected one frame reflected in front, got {pad}"
    if hift.stft_window.shape != (n_fft,):
        return f"the window must be as long as n_fft, got {tuple(hift.stft_window.shape)} and {n_fft}"
    if (reason := spectral.window_fault(hift.stft_window, hop)) is not None:
        return reason
    for conv in (hift.conv_pre, hift.conv_post):
        if (reason := conv_unsupported(conv)) is not None:
            return reason
    for up in hift.ups:
        if (reason := polyphase.unsupported(up)) is not None:
            return reason
        exact = up.kernel_size[0] - 2 * up.padding[0] + up.output_padding[0] == up.stride[0]
        if up.groups != 1 or (class_of(up) is nn.ConvTranspose1d and not exact):
            return f"expected an upsampling by its stride, got {up}"
    if polyphase.frames_in_front(hift.ups[-1]) < 1:
        return f"expected padding in the last upsampling convolution, got {hift.ups[-1]}"
    if (reason := _source_downs.fault(hift.source_downs)) is not None:
        return reason
    convolutions = [hift.conv_pre, hift.conv_post, *hift.ups, *hift.source_downs]
    if any(conv.bias is None for conv in convolutions):
        return "expected a bias in every convolution"
    blocks = [*hift.source_resblocks, *hift.resblocks]
    return next((reason for block in blocks if (reason := block_fault(block)) is not None), None)
