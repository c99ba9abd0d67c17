"""f0 and the harmonic source of HiFT with valid lengths: what ``inference`` does before ``decode``.

f0 in the predictor's own type (fp64 of a causal one: upstream casts it), weight norm folded, ELU in place; convolutions
are cuDNN's. The source follows from f0 at frame rate, one kernel (kernels/sine_source.py, held_source.py); of a causal
one the phase and the sines are made by upstream's operations, at frames instead of samples. Random numbers come from
outside (``draw``). Lengths are int64 [rows] on the device, valid mel frames.
Source: inference in cosyvoice/hifigan/generator.py and chatterbox/models/s3gen/hifigan.py; their f0_predictor.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions.uniform import Uniform

from voxfuse.fusions import source
from voxfuse.fusions.folded import folded_weight
from voxfuse.kernels._op import Run
from voxfuse.kernels._packs import pack
from voxfuse.kernels._weight_norm import class_of
from voxfuse.kernels.held_source import held_source
from voxfuse.kernels.sine_source import MAX_HARMONICS, sine_source, stepped_source

NOISE_FRAMES = 2048  # of a causal source's noise that is kept on the device: 35 MB at 480 samples and 9 harmonics
STEPPED, INTERPOLATED, CAUSAL = "SineGen", "SineGen2", "causal SineGen2"


def kind_of(sines: Any) -> str:
    """Which of the three sources a SineGen or SineGen2 is."""
    return CAUSAL if getattr(sines, "causal", False) else type(sines).__name__


def harmonics_of(sines: Any) -> int:
    """The fundamental and its overtones."""
    return sines.harmonic_num + 1


def fault(hift: Any) -> str | None:
    """What in a generator's f0 predictor or source is outside what is computed here, or None."""
    merge, sines = hift.m_source, hift.m_source.l_sin_gen
    kind = kind_of(sines)
    if kind not in (STEPPED, INTERPOLATED, CAUSAL):
        return f"expected sines of SineGen or SineGen2, got {kind}"
    if getattr(sines, "flag_for_pulse", False):
        return "the source is a pulse train (flag_for_pulse)"
    if type(merge.l_linear) is not nn.Linear or merge.l_linear.bias is None or type(merge.l_tanh) is not nn.Tanh:
        return f"expected Linear with bias and Tanh, got {merge.l_linear} and {merge.l_tanh}"
    scale = hift.f0_upsamp.scale_factor
    if type(hift.f0_upsamp) is not nn.Upsample or hift.f0_upsamp.mode != "nearest" or scale < 3 or scale % 1:
        return f"expected f0 held for 3 samples or more, got {hift.f0_upsamp}"
    if kind != STEPPED and sines.upsample_scale != scale:
        return f"f0 is upsampled by {scale}, and the source's phase by {sines.upsample_scale}"
    if harmonics_of(sines) > MAX_HARMONICS:
        return f"expected at most {MAX_HARMONICS} harmonics, got {harmonics_of(sines)}"
    return predictor_fault(hift.f0_predictor)


def predictor_fault(predictor: Any) -> str | None:
    """What in an f0 predictor is not as upstream builds it, or None."""
    layers = list(predictor.condnet)
    for conv, activation in zip(layers[::2], layers[1::2], strict=True):
        if type(activation) is not nn.ELU or activation.alpha != 1:
            return f"expected ELU, got {activation}"
        kind, taps = class_of(conv), conv.kernel_size[0]
        causal = kind.__name__ == "CausalConv1d" and (conv.padding, conv.causal_padding) == ((0,), taps - 1)
        plain = kind is nn.Conv1d and conv.padding == (taps // 2,) and taps % 2
        rest = conv.stride, conv.dilation, conv.groups, conv.padding_mode
        if not (causal or plain) or rest != ((1,), (1,), 1, "zeros") or folded_weight(conv) is None:
            return f"expected a convolution that keeps the length, got {conv}"
    return None if type(predictor.classifier) is nn.Linear else f"expected Linear, got {predictor.classifier}"


def frequencies(predictor: Any, mel: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """The predictor's forward: mel [rows, bins, frames] → Hz [rows, frames], in the type of its weights.

    Where more frames will follow, the last ones of a causal predictor (the first convolution's padding) mean nothing.
    """
    frames = mel.shape[2]
    outside = None if lengths is None else torch.arange(frames, device=mel.device) >= lengths[:, None, None]
    x = mel.to(predictor.classifier.weight.dtype)
    for conv in list(predictor.condnet)[::2]:
        if outside is not None:
            x = x.masked_fill(outside, 0.0)
        weight = folded_weight(conv)
        assert weight is not None, "asked before: predictor_fault"
        side, spare = getattr(conv, "causal_type", "both"), weight.shape[2] - 1
        x = F.conv1d(x, weight, conv.bias, padding=spare // 2 if side == "both" else spare)
        start = spare if side == "right" else 0
        x = F.elu_(x[:, :, start : start + frames])
    return F.linear(x.transpose(1, 2), predictor.classifier.weight, predictor.classifier.bias).squeeze(-1).abs_()


def noise_shape(hift: Any, rows: int, frames: int) -> tuple[int, int, int]:
    """Of the noise that ``draw`` gives: [rows, harmonics, samples]."""
    return rows, harmonics_of(hift.m_source.l_sin_gen), frames * int(hift.f0_upsamp.scale_factor)


def draw(hift: Any, rows: int, frames: int, device: torch.device) -> list[torch.Tensor]:
    """The random numbers of one ``inference``, by upstream's calls, shapes, strides and order, also those whose result
    changes nothing: none of a causal source, noise of an interpolated one, noise and initial turns of a stepped one."""
    sines = hift.m_source.l_sin_gen
    kind = kind_of(sines)
    if kind == CAUSAL:
        return []
    shape = noise_shape(hift, rows, frames)
    if kind == INTERPOLATED:
        torch.rand(rows, shape[1], device=device)
        like = torch.empty(shape, device=device).transpose(1, 2)  # the strides decide how a CPU fills it
        drawn = [torch.randn_like(like).transpose(1, 2)]
    else:
        phases = Uniform(low=-math.pi, high=math.pi).sample(torch.Size((rows, shape[1], 1)))  # on the CPU, as upstream
        phases[:, 0] = 0
        drawn = [torch.randn(shape, device=device), (phases[:, :, 0] / (2 * math.pi)).to(device)]
    torch.randn(rows, shape[2], 1, device=device)  # of the noise branch, which HiFT leaves unused
    return drawn


def harmonic_source(
    hift: Any, f0: torch.Tensor, drawn: list[torch.Tensor], lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """The source [rows, samples] of f0 [rows, frames] in fp32, zero behind each row's end."""
    merge, scale = hift.m_source, int(hift.f0_upsamp.scale_factor)
    if kind_of(merge.l_sin_gen) == CAUSAL:
        return causal_source(merge, f0.expand(2, *f0.shape), f0, lengths, run)
    sines = merge.l_sin_gen
    noise = drawn[0].transpose(1, 2)
    call, initial = (stepped_source, drawn[1]) if len(drawn) > 1 else (sine_source, noise[:, 0])
    settings = float(sines.sampling_rate), float(sines.sine_amp), float(sines.noise_std), float(sines.voiced_threshold)
    weight, bias = merge.l_linear.weight, merge.l_linear.bias
    return call(f0, initial, noise, weight, bias, lengths, scale, *settings, run=run)


def causal_source(
    merge: Any, middle: torch.Tensor, f0: torch.Tensor, lengths: torch.Tensor | None, run: Run
) -> torch.Tensor:
    """A causal source [rows, samples] of f0 [rows, frames], held, or [rows, samples]; ``middle`` [2, rows, frames]: f0
    at the two samples in the middle of each frame.

    Upstream's linear interpolation down looks at those alone, half and half, and the one up is "nearest": its sines are
    constant within a frame, and its random phases, which begin at sample 0, change nothing.
    """
    sines, linear = merge.l_sin_gen, merge.l_linear
    _, rows, frames = middle.shape
    scale = int(sines.upsample_scale)
    noise = _noise(sines, frames * scale, f0.device).expand(rows, -1, -1)
    settings = float(sines.sine_amp), float(sines.noise_std), float(sines.voiced_threshold)
    waves = frame_sines(sines, middle)
    return held_source(waves, f0, noise, linear.weight, linear.bias, lengths, scale, *settings, run=run)


def frame_sines(sines: Any, middle: torch.Tensor) -> torch.Tensor:
    """The sines of a causal SineGen2 [rows, frames, harmonics], by upstream's operations: to the bit, on any device."""
    k = torch.arange(1, harmonics_of(sines) + 1, device=middle.device).to(middle.dtype)[:, None]
    turns = (middle.unsqueeze(2) * k / sines.sampling_rate) % 1  # [2, rows, harmonics, frames]
    turns = (turns[0] * 0.5 + turns[1] * 0.5).transpose(1, 2)
    phase = torch.cumsum(turns, dim=1) * 2 * math.pi
    return torch.sin(phase.transpose(1, 2) * int(sines.upsample_scale)).transpose(1, 2)


def _noise(sines: Any, samples: int, device: torch.device) -> torch.Tensor:
    """The source's own noise [1, samples, harmonics] on a device."""
    kept = min(NOISE_FRAMES * int(sines.upsample_scale), sines.sine_waves.shape[1])
    if samples > kept:
        return sines.sine_waves[:, :samples].to(device)
    noise = pack(sines, f"noise on {device}", [sines.sine_waves], lambda: sines.sine_waves[:, :kept].to(device))
    return noise[:, :samples]


def module_unsupported(merge: Any, x: torch.Tensor) -> str | None:
    """Why a SourceModuleHnNSF with a SineGen2 cannot be fused on x [rows, samples, 1], f0 in Hz, or None."""
    if (reason := source.unsupported(merge, x)) is not None:
        return reason
    sines = merge.l_sin_gen
    scale, samples = int(sines.upsample_scale), x.shape[1]
    if scale < 3 or samples % scale:
        return f"expected a multiple of {scale} (at least 3) samples, got {samples}"
    if merge.training:
        return "the source is in training mode"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *merge.parameters())):
        return "a gradient is needed; call under torch.no_grad() or torch.inference_mode()"
    if kind_of(sines) == CAUSAL and samples > sines.sine_waves.shape[1]:
        return f"{samples} samples, and the source drew noise for {sines.sine_waves.shape[1]}"
    return None


def run_module(merge: Any, x: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SourceModuleHnNSF.forward of x [rows, samples, 1] in Hz: source, noise and voiced mask, each of x's shape."""
    sines, f0 = merge.l_sin_gen, x[:, :, 0]
    if kind_of(sines) != CAUSAL:
        return source.harmonic_source(merge, x, run)
    scale = int(sines.upsample_scale)
    middle = torch.stack([f0[:, (scale - 1) // 2 :: scale], f0[:, scale // 2 :: scale]])
    voiced = (x > sines.voiced_threshold).type(torch.float32)
    noise = merge.uv[:, : x.shape[1]] * merge.sine_amp / 3
    return causal_source(merge, middle, f0, None, run).unsqueeze(-1), noise, voiced
