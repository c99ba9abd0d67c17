"""The harmonic source of Kokoro's generator: phase at frame rate, then sines, noise, linear and tanh in one kernel.

Random numbers are drawn here, by upstream's calls, shapes, strides and order, also those whose result changes nothing.
Source: SourceModuleHnNSF and SineGen in kokoro/istftnet.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from voxfuse.kernels._op import Run
from voxfuse.kernels.sine_source import sine_source
from voxfuse.records import Fusion, FusionPattern

SINE_SOURCE = Fusion(
    name="sine_source",
    stacks=("kokoro", "cosyvoice2", "cosyvoice3", "chatterbox"),
    operations=("interpolate", "cumsum", "interpolate", "sin", "noise", "linear", "tanh"),
    contract="same-precision",
    envelope="fp32 [rows, samples, 1], upsampled by 3 or more, at most 16 harmonics; inference only",
    kernels=("sine_source", "held_source"),
    patterns=(FusionPattern(modules=("SourceModuleHnNSF",)),),
)


def unsupported(source: Any, x: torch.Tensor) -> str | None:
    """Why a SourceModuleHnNSF cannot be fused on x [rows, samples, 1], or None."""
    if x.dtype != torch.float32 or x.dim() != 3 or x.shape[-1] != 1:
        return f"f0 must be fp32 [rows, samples, 1], got {x.dtype} {tuple(x.shape)}"
    if source.l_sin_gen.flag_for_pulse:
        return "the source is a pulse train (flag_for_pulse)"
    if type(source.l_linear) is not nn.Linear or source.l_linear.bias is None or type(source.l_tanh) is not nn.Tanh:
        return f"expected Linear with bias and Tanh, got {source.l_linear} and {source.l_tanh}"
    return None


def harmonic_source(source: Any, x: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SourceModuleHnNSF.forward of x [rows, samples, 1] in Hz: source, noise and voiced mask, each of x's shape."""
    sines = source.l_sin_gen
    rows, samples, _ = x.shape
    initial = torch.rand(rows, sines.dim, device=x.device)
    layout = torch.empty((rows, sines.dim, samples), dtype=x.dtype, device=x.device).transpose(1, 2)
    merged = sine_source(
        x[:, :, 0],
        initial,
        torch.randn_like(layout),
        source.l_linear.weight,
        source.l_linear.bias,
        None,
        int(sines.upsample_scale),
        float(sines.sampling_rate),
        float(sines.sine_amp),
        float(sines.noise_std),
        float(sines.voiced_threshold),
        run=run,
    )
    voiced = (x > sines.voiced_threshold).type(torch.float32)
    noise = torch.randn_like(voiced) * source.sine_amp / 3
    return merged.unsqueeze(-1), noise, voiced
