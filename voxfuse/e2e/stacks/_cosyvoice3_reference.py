"""A compact reference of CosyVoice3's vocoder, for where no checkout of FunAudioLLM/CosyVoice is at hand.

Module names, attributes, parameter names and shapes, the order of random draws at construction and the results are
those of upstream's classes of the same names (main branch, commit ace7c47f41bb), so a checkpoint of either loads into
the other. Only what inference needs is here: no training forward, no ``remove_weight_norm`` (upstream's fails on
parametrisations). Layouts: [rows, channels, frames]; mel frames last 20 ms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

NOISE_SAMPLES = 300 * 24_000  # upstream draws the noise of 5 minutes when a source is made, and slices it ever after
NO_CACHE = torch.zeros(0, 0, 0)  # upstream's default: nothing known of the frames outside
NO_SOURCE = torch.zeros(1, 1, 0)  # upstream's default of ``decode``


class Snake(nn.Module):
    """x + sin²(αx) / α, an α for each channel (arXiv:2006.08195)."""

    def __init__(
        self, in_features: int, alpha: float = 1.0, alpha_trainable: bool = True, alpha_logscale: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.alpha_logscale, self.no_div_by_zero = in_features, alpha_logscale, 1e-9
        initial = (torch.zeros if alpha_logscale else torch.ones)(in_features) * alpha
        self.alpha = nn.Parameter(initial, requires_grad=alpha_trainable)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, channels, frames]; the same shape."""
        alpha = self.alpha[None, :, None]
        if self.alpha_logscale:
            alpha = torch.exp(alpha)
        return x + (1.0 / (alpha + self.no_div_by_zero)) * torch.pow(torch.sin(x * alpha), 2)


class CausalConv1d(nn.Conv1d):
    """A convolution that keeps the length: all of its padding on one side, zeros or ``cache`` (what is known there)."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, dilation: int = 1, causal_type: str = "left"
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, dilation=dilation)
        self.causal_padding = (kernel_size - 1) * dilation // 2 * 2 + (kernel_size + 1) % 2
        self.causal_type = causal_type

    def forward(self, x: torch.Tensor, cache: torch.Tensor = NO_CACHE) -> torch.Tensor:
        """x [rows, in channels, frames], cache [rows, in channels, causal_padding] or empty: as many frames."""
        if cache.shape[2] == 0:
            cache = x.new_zeros(*x.shape[:2], self.causal_padding)
        return super().forward(torch.cat([cache, x] if self.causal_type == "left" else [x, cache], dim=2))


class CausalConv1dDownSample(nn.Conv1d):
    """A strided convolution with stride − 1 zeros in front."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride)
        self.causal_padding = stride - 1

    def forward(self, x: torch.Tensor, cache: torch.Tensor = NO_CACHE) -> torch.Tensor:
        """x [rows, in channels, frames]; cache [rows, in channels, causal_padding] or empty."""
        padded = F.pad(x, (self.causal_padding, 0)) if cache.shape[2] == 0 else torch.cat([cache, x], dim=2)
        return super().forward(padded)


class CausalConv1dUpsample(nn.Conv1d):
    """Every frame repeated ``stride`` times, then a convolution with all of its padding in front."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size)
        self.causal_padding = kernel_size - 1
        self.upsample = nn.Upsample(scale_factor=stride, mode="nearest")

    def forward(self, x: torch.Tensor, cache: torch.Tensor = NO_CACHE) -> torch.Tensor:
        """x [rows, in channels, frames]; ``stride`` times as many frames."""
        x = self.upsample(x)
        padded = F.pad(x, (self.causal_padding, 0)) if cache.shape[2] == 0 else torch.cat([cache, x], dim=2)
        return super().forward(padded)


class ResBlock(nn.Module):
    """x + conv2(snake(conv1(snake(x)))), once for each dilation, causal."""

    def __init__(
        self, channels: int = 512, kernel_size: int = 3, dilations: Sequence[int] = (1, 3, 5), causal: bool = True
    ) -> None:
        super().__init__()
        if not causal:
            raise ValueError("the reference has CosyVoice3's causal blocks only")
        self.causal = causal
        pairs = [
            [weight_norm(CausalConv1d(channels, channels, kernel_size, dilation=d)) for d in (dilation, 1)]
            for dilation in dilations
        ]
        self.convs1, self.convs2 = (nn.ModuleList(convs) for convs in zip(*pairs, strict=True))
        self.activations1 = nn.ModuleList(Snake(channels) for _ in dilations)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in dilations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, channels, frames]; the same shape."""
        for act1, conv1, act2, conv2 in zip(
            self.activations1, self.convs1, self.activations2, self.convs2, strict=True
        ):
            x = conv2(act2(conv1(act1(x)))) + x
        return x


class SineGen2(nn.Module):
    """Sines at the multiples of f0, with noise (arXiv:1810.11946); the noise is drawn once, at construction."""

    def __init__(
        self,
        samp_rate: float,
        upsample_scale: int,
        harmonic_num: int = 0,
        sine_amp: float = 0.1,
        noise_std: float = 0.003,
        voiced_threshold: float = 0,
    ) -> None:
        super().__init__()
        self.sine_amp, self.noise_std, self.harmonic_num, self.dim = sine_amp, noise_std, harmonic_num, harmonic_num + 1
        self.sampling_rate, self.voiced_threshold, self.upsample_scale = samp_rate, voiced_threshold, upsample_scale
        self.flag_for_pulse, self.causal = False, True
        self.rand_ini = torch.rand(1, 9)
        self.rand_ini[:, 0] = 0
        self.sine_waves = torch.rand(1, NOISE_SAMPLES, 9)

    def _f02uv(self, f0: torch.Tensor) -> torch.Tensor:
        return (f0 > self.voiced_threshold).type(torch.float32)

    def _f02sine(self, f0_values: torch.Tensor) -> torch.Tensor:
        scale = self.upsample_scale
        rad = (f0_values / self.sampling_rate) % 1
        rad[:, 0, :] = rad[:, 0, :] + self.rand_ini.to(rad.device)
        rad = F.interpolate(rad.transpose(1, 2), scale_factor=1 / scale, mode="linear").transpose(1, 2)
        phase = torch.cumsum(rad, dim=1) * 2 * np.pi
        phase = F.interpolate(phase.transpose(1, 2) * scale, scale_factor=scale, mode="nearest").transpose(1, 2)
        return torch.sin(phase)

    def forward(self, f0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """f0 [rows, samples, 1] in Hz: sines with noise [rows, samples, dim], voiced mask, noise alone."""
        harmonics = torch.arange(1, self.harmonic_num + 2, dtype=torch.float32).to(f0.device)
        sines = self._f02sine(torch.multiply(f0, harmonics)) * self.sine_amp
        voiced = self._f02uv(f0)
        noise_amp = voiced * self.noise_std + (1 - voiced) * self.sine_amp / 3
        noise = noise_amp * self.sine_waves[:, : sines.shape[1]].to(sines.device)
        return sines * voiced + noise, voiced, noise


class SourceModuleHnNSF(nn.Module):
    """The harmonics of ``SineGen2`` merged by a linear layer and tanh."""

    def __init__(
        self,
        sampling_rate: float,
        upsample_scale: int,
        harmonic_num: int = 0,
        sine_amp: float = 0.1,
        add_noise_std: float = 0.003,
        voiced_threshod: float = 0,
    ) -> None:
        super().__init__()
        self.sine_amp, self.noise_std, self.causal = sine_amp, add_noise_std, True
        self.l_sin_gen = SineGen2(sampling_rate, upsample_scale, harmonic_num, sine_amp, add_noise_std, voiced_threshod)
        self.l_linear = nn.Linear(harmonic_num + 1, 1)
        self.l_tanh = nn.Tanh()
        self.uv = torch.rand(1, NOISE_SAMPLES, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [rows, samples, 1], f0 in Hz: source, noise (from the host) and voiced mask, of x's shape."""
        with torch.no_grad():
            sines, voiced, _ = self.l_sin_gen(x)
        return self.l_tanh(self.l_linear(sines)), self.uv[:, : voiced.shape[1]] * self.sine_amp / 3, voiced


class CausalConvRNNF0Predictor(nn.Module):
    """f0 of each mel frame from the frames before it and three behind it."""

    def __init__(self, num_class: int = 1, in_channels: int = 80, cond_channels: int = 512) -> None:
        super().__init__()
        self.num_class = num_class
        layers: list[nn.Module] = [weight_norm(CausalConv1d(in_channels, cond_channels, 4, causal_type="right"))]
        layers += [weight_norm(CausalConv1d(cond_channels, cond_channels, 3)) for _ in range(4)]
        self.condnet = nn.Sequential(*itertools.chain.from_iterable((layer, nn.ELU()) for layer in layers))
        self.classifier = nn.Linear(cond_channels, num_class)

    def forward(self, x: torch.Tensor, finalize: bool = True) -> torch.Tensor:
        """x [rows, bins, frames] → Hz [rows, frames]; three frames fewer where more of them will follow."""
        first: Any = self.condnet[0]
        ahead = first.causal_padding
        x = first(x) if finalize is True else first(x[:, :, :-ahead], x[:, :, -ahead:])
        for index in range(1, len(self.condnet)):
            x = self.condnet[index](x)
        return torch.abs(self.classifier(x.transpose(1, 2)).squeeze(-1))


class CausalHiFTGenerator(nn.Module):
    """HiFTNet (arXiv:2309.09493), causal but for the frames that ``conv_pre`` and the f0 predictor look ahead."""

    def __init__(
        self,
        in_channels: int = 80,
        base_channels: int = 512,
        nb_harmonics: int = 8,
        sampling_rate: int = 24_000,
        nsf_alpha: float = 0.1,
        nsf_sigma: float = 0.003,
        nsf_voiced_threshold: float = 10,
        upsample_rates: Sequence[int] = (8, 5, 3),
        upsample_kernel_sizes: Sequence[int] = (16, 11, 7),
        istft_params: dict[str, int] | None = None,
        resblock_kernel_sizes: Sequence[int] = (3, 7, 11),
        resblock_dilation_sizes: Sequence[Sequence[int]] = ((1, 3, 5),) * 3,
        source_resblock_kernel_sizes: Sequence[int] = (7, 7, 11),
        source_resblock_dilation_sizes: Sequence[Sequence[int]] = ((1, 3, 5),) * 3,
        lrelu_slope: float = 0.1,
        audio_limit: float = 0.99,
        conv_pre_look_right: int = 4,
        f0_predictor: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.istft_params = istft_params or {"n_fft": 16, "hop_len": 4}
        n_fft, hop = self.istft_params["n_fft"], self.istft_params["hop_len"]
        self.out_channels, self.nb_harmonics, self.sampling_rate = 1, nb_harmonics, sampling_rate
        self.lrelu_slope, self.audio_limit = lrelu_slope, audio_limit
        self.num_kernels, self.num_upsamples = len(resblock_kernel_sizes), len(upsample_rates)
        self.upsample_rates, self.conv_pre_look_right = upsample_rates, conv_pre_look_right
        scale = math.prod(upsample_rates) * hop
        self.m_source = SourceModuleHnNSF(
            sampling_rate, scale, nb_harmonics, nsf_alpha, nsf_sigma, nsf_voiced_threshold
        )
        self.f0_upsamp = nn.Upsample(scale_factor=scale)
        widths = [base_channels // 2**i for i in range(len(upsample_rates) + 1)]
        self.conv_pre = weight_norm(
            CausalConv1d(in_channels, base_channels, conv_pre_look_right + 1, causal_type="right")
        )
        self.ups = nn.ModuleList(
            weight_norm(CausalConv1dUpsample(*channels, taps, rate))
            for channels, taps, rate in zip(
                itertools.pairwise(widths), upsample_kernel_sizes, upsample_rates, strict=True
            )
        )
        self.source_downs, self.source_resblocks, self.resblocks = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for i, (taps, dilations) in enumerate(
            zip(source_resblock_kernel_sizes, source_resblock_dilation_sizes, strict=True)
        ):
            rate, width = math.prod(upsample_rates[i + 1 :]), widths[i + 1]
            self.source_downs.append(
                CausalConv1d(n_fft + 2, width, 1)
                if rate == 1
                else CausalConv1dDownSample(n_fft + 2, width, 2 * rate, rate)
            )
            self.source_resblocks.append(ResBlock(width, taps, dilations))
            self.resblocks.extend(
                ResBlock(width, *sizes) for sizes in zip(resblock_kernel_sizes, resblock_dilation_sizes, strict=True)
            )
        self.conv_post = weight_norm(CausalConv1d(widths[-1], n_fft + 2, 7))
        self.reflection_pad = nn.ReflectionPad1d((1, 0))
        self.stft_window = torch.hann_window(n_fft, dtype=torch.float64).float()
        self.f0_predictor = f0_predictor

    def _stft(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n_fft, hop = self.istft_params["n_fft"], self.istft_params["hop_len"]
        spectrum = torch.stft(x, n_fft, hop, n_fft, window=self.stft_window.to(x.device), return_complex=True)
        return spectrum.real, spectrum.imag

    def _istft(self, magnitude: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
        n_fft, hop = self.istft_params["n_fft"], self.istft_params["hop_len"]
        magnitude = torch.clip(magnitude, max=1e2)
        spectrum = torch.complex(magnitude * torch.cos(phase), magnitude * torch.sin(phase))
        return torch.istft(spectrum, n_fft, hop, n_fft, window=self.stft_window.to(magnitude.device))

    def decode(self, x: torch.Tensor, s: torch.Tensor = NO_SOURCE, finalize: bool = True) -> torch.Tensor:
        """x [rows, bins, frames], source s [rows, 1, samples] → [rows, samples].

        Where more will follow (``finalize`` False) the last ``conv_pre_look_right`` frames are only looked at, and one
        frame more is held back for the inverse transform.
        """
        spectrum = torch.cat(self._stft(s.squeeze(1)), dim=1)
        frame, ahead = math.prod(self.upsample_rates), self.conv_pre_look_right
        if finalize is True:
            x = self.conv_pre(x)
        else:
            x = self.conv_pre(x[:, :, :-ahead], x[:, :, -ahead:])
            spectrum = spectrum[:, :, : -frame * ahead]
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, self.lrelu_slope))
            if i == self.num_upsamples - 1:
                x = self.reflection_pad(x)
            x = x + self.source_resblocks[i](self.source_downs[i](spectrum))
            first, *others = self.resblocks[i * self.num_kernels : (i + 1) * self.num_kernels]
            total = first(x)
            for block in others:
                total += block(x)
            x = total / self.num_kernels
        magnitude, phase = self.conv_post(F.leaky_relu(x)).split(self.istft_params["n_fft"] // 2 + 1, dim=1)
        audio = self._istft(torch.exp(magnitude), torch.sin(phase))
        if finalize is False:
            audio = audio[:, : -frame * self.istft_params["hop_len"]]
        return torch.clamp(audio, -self.audio_limit, self.audio_limit)

    @torch.inference_mode()
    def inference(self, speech_feat: torch.Tensor, finalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """mel [rows, bins, frames] → audio [rows, samples] and its source [rows, 1, samples]; f0 in fp64."""
        predictor: Any = self.f0_predictor
        predictor.to(torch.float64)
        f0 = predictor(speech_feat.to(torch.float64), finalize=finalize).to(speech_feat)
        source, _, _ = self.m_source(self.f0_upsamp(f0[:, None]).transpose(1, 2))
        source = source.transpose(1, 2)
        mel = speech_feat if finalize is True else speech_feat[:, :, : -predictor.condnet[0].causal_padding]
        return self.decode(x=mel, s=source, finalize=finalize), source
