"""Arms of what a vocoder with a harmonic source and a spectral head does (iSTFTNet): block, spectra, source.

A case gives the main tensor ``x``; everything else follows from its shape and the parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from voxfuse.fusions import adain_conv_block, snake_conv_block
from voxfuse.kernels._op import Run
from voxfuse.kernels._phases import PLAIN
from voxfuse.kernels.held_source import held_source
from voxfuse.kernels.istft import istft_polar
from voxfuse.kernels.sine_source import sine_source
from voxfuse.kernels.snake import snake
from voxfuse.kernels.stepped_source import stepped_source
from voxfuse.kernels.stft import stft_polar
from voxfuse.microbench.operation import Operation, smooth
from voxfuse.microbench.timer import Inputs
from voxfuse.records import Case

N_FFT, HOP = 20, 5  # Kokoro's
STYLE_WIDTH = 128


class _AdaIN(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(channels, affine=True)
        self.fc = nn.Linear(STYLE_WIDTH, 2 * channels)

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        gamma, beta = self.fc(style).unsqueeze(-1).chunk(2, dim=1)
        return (1 + gamma) * self.norm(x) + beta


class AdainSnakeBlock(nn.Module):
    """AdaINResBlock1 of StyleTTS 2 (arXiv:2306.07691): three times x + conv(snake(adain(conv(snake(adain(x))))))."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()

        def convolutions(dilations: tuple[int, ...]) -> nn.ModuleList:
            return nn.ModuleList(
                nn.utils.weight_norm(nn.Conv1d(channels, channels, taps, dilation=d, padding=d * (taps - 1) // 2))
                for d in dilations
            )

        def alphas() -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.exp(0.3 * torch.randn(1, channels, 1))) for _ in range(3))

        self.convs1, self.convs2 = convolutions((1, 3, 5)), convolutions((1, 1, 1))
        self.adain1, self.adain2 = (nn.ModuleList(_AdaIN(channels) for _ in range(3)) for _ in range(2))
        self.alpha1, self.alpha2 = alphas(), alphas()

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """x [rows, channels, frames], style [rows, 128]."""
        for conv1, conv2, adain1, adain2, a1, a2 in zip(
            self.convs1, self.convs2, self.adain1, self.adain2, self.alpha1, self.alpha2, strict=True
        ):
            y = adain1(x, style)
            y = conv1(y + (1 / a1) * torch.sin(a1 * y) ** 2)
            y = adain2(y, style)
            x = conv2(y + (1 / a2) * torch.sin(a2 * y) ** 2) + x
        return x


class _Snake(nn.Module):
    """x + sin²(α·x) / (α + 1e-9), as HiFT's."""

    alpha_logscale, no_div_by_zero = False, 1e-9

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.exp(0.3 * torch.randn(channels)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alpha = self.alpha.unsqueeze(0).unsqueeze(-1)
        return x + (1.0 / (alpha + self.no_div_by_zero)) * torch.pow(torch.sin(x * alpha), 2)


class CausalConv1d(nn.Conv1d):
    """A convolution whose zeros all lie in front. Upstream makes them on the host and copies them, which no CUDA graph
    can hold: here they are made on the device, and leaving the copy out is in favour of the eager chain."""

    def __init__(self, channels: int, taps: int, dilation: int) -> None:
        super().__init__(channels, channels, taps, dilation=dilation)
        self.causal_padding, self.causal_type = dilation * (taps - 1), "left"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, channels, frames]."""
        zeros = x.new_zeros(*x.shape[:2], self.causal_padding)
        return super().forward(torch.cat([zeros, x], dim=2))


class SnakeBlock(nn.Module):
    """ResBlock of HiFT (arXiv:2309.09493): three times x + conv(snake(conv(snake(x)))). Weight norm as a
    parametrisation, as upstream's."""

    def __init__(self, channels: int, taps: int, causal: bool = False) -> None:
        super().__init__()

        def convolution(d: int) -> nn.Conv1d:
            if causal:
                return CausalConv1d(channels, taps, d)
            return nn.Conv1d(channels, channels, taps, dilation=d, padding=d * (taps - 1) // 2)

        def convolutions(dilations: tuple[int, ...]) -> nn.ModuleList:
            return nn.ModuleList(nn.utils.parametrizations.weight_norm(convolution(d)) for d in dilations)

        self.convs1, self.convs2 = convolutions((1, 3, 5)), convolutions((1, 1, 1))
        self.activations1, self.activations2 = (nn.ModuleList(_Snake(channels) for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, channels, frames]."""
        for conv1, conv2, snake1, snake2 in zip(
            self.convs1, self.convs2, self.activations1, self.activations2, strict=True
        ):
            x = conv2(snake2(conv1(snake1(x)))) + x
        return x


class HiftBlock:
    """The block with random weights, in fp32 and fp64, and its fusion."""

    def __init__(self, case: Case, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            causal = case.parameters.get("padding") == "left"
            block = SnakeBlock(case.tensors["x"].shape[1], int(case.parameters["taps"]), causal).eval()
        self._single, self._double = block.to(device), copy.deepcopy(block).double().to(device)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """The eager block."""
        return (self._double if x.dtype == torch.float64 else self._single)(x)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """The fused block on x."""
        (x,) = args
        return snake_conv_block.run_block(self._single, x, run)


def hift_block_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x [rows, channels, frames]."""
    return (smooth(case.tensors["x"], generator),)


class SnakePass:
    """Snake of a convolution's x + bias + residual in plain order, all rows whole: eager makes no tail and no phases.

    The result is the activated one. With a residual the sum is written too, whose bytes the ceiling leaves out.
    """

    def reference(
        self, x: torch.Tensor, bias: torch.Tensor, alpha: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Upstream's chain, the channels last."""
        raw = x + bias
        raw = raw if residual is None else raw + residual
        return raw + (1.0 / (alpha + 1e-9)) * torch.pow(torch.sin(raw * alpha), 2)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """The fused pass."""
        x, bias, alpha, residual = args
        return snake(x, bias, residual, alpha, None, x.shape[1], 1, *PLAIN, residual is not None, run=run)[1]


def snake_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x [rows, frames, channels], bias and alpha [channels], and the residual at an iteration's end (else None)."""
    x = smooth(case.tensors["x"], generator)
    bias, alpha = (torch.randn(x.shape[2], generator=generator, device=x.device) * 0.3 for _ in range(2))
    residual = smooth(case.tensors["residual"], generator) if "residual" in case.tensors else None
    return x, bias, alpha.exp(), residual


class Block:
    """The block with random weights, in fp32 and fp64, and its fusion."""

    def __init__(self, case: Case, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            block = AdainSnakeBlock(case.tensors["x"].shape[1], int(case.parameters["taps"])).eval()
        self._single, self._double = block.to(device), copy.deepcopy(block).double().to(device)

    def reference(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """The eager block."""
        return (self._double if x.dtype == torch.float64 else self._single)(x, style)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """The fused block on x and style."""
        x, style = args
        return adain_conv_block.run_block(self._single, x, style, run)


def block_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x [rows, channels, frames] and style [rows, 128]."""
    x = smooth(case.tensors["x"], generator)
    return x, torch.randn(x.shape[0], STYLE_WIDTH, generator=generator, device=x.device)


def block_flop(case: Case) -> int:
    """Of the six convolutions."""
    rows, channels, frames = case.tensors["x"].shape
    return 6 * 2 * rows * frames * channels**2 * int(case.parameters["taps"])


def _window(device: torch.device) -> torch.Tensor:
    return torch.hann_window(N_FFT, device=device)


def _harmonic(case: Case, generator: torch.Generator) -> torch.Tensor:
    """[rows, samples]: a sum of drifting sines, and noise."""
    rows, samples = case.tensors["x"].shape
    device = generator.device
    drift = torch.randn(rows, samples, generator=generator, device=device).cumsum(1) * 1e-3
    turns = torch.arange(samples, device=device) * 0.005 + drift
    sines = sum((turns * 6.2832 * k).sin() / k for k in range(1, 5))
    return 0.1 * sines + 0.003 * torch.randn(rows, samples, generator=generator, device=device)


def stft_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x [rows, samples], window, lengths (None), hop."""
    return _harmonic(case, generator), _window(generator.device), None, HOP


def as_complex(polar: torch.Tensor) -> torch.Tensor:
    """Magnitude, and real and imaginary part: a phase of pi is one of -pi."""
    magnitude, phase = polar.chunk(2, dim=1)
    return torch.cat([magnitude, magnitude * phase.cos(), magnitude * phase.sin()], dim=1)


def istft_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Log magnitude and what the phase is the sine of [rows, bins, frames], window, lengths (None), hop, head."""
    x = torch.randn(case.tensors["x"].shape, generator=generator, device=generator.device)
    bins = N_FFT // 2 + 1
    return x[:, :bins] - 3, 2 * x[:, bins:], _window(generator.device), None, HOP, "exp_sin"


def source_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """f0 [rows, samples] in Hz, one value a frame, some unvoiced; initial phases, noise, linear, None, settings."""
    rows, samples = case.tensors["x"].shape
    scale, device, harmonics = int(case.parameters["scale"]), generator.device, 9

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    f0 = 140 + 25 * normal(rows, samples // scale)
    f0 = torch.where(normal(rows, samples // scale) > 1.2, 0.0, f0).repeat_interleave(scale, dim=1)
    initial = torch.rand(rows, harmonics, generator=generator, device=device)
    linear = 0.3 * normal(1, harmonics), 0.1 * normal(1)
    return f0, initial, normal(rows, samples, harmonics), *linear, None, scale, 24_000.0, 0.1, 0.003, 10.0


def stepped_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """As ``source_inputs``, f0 [rows, frames], initial phases of either sign."""
    f0, initial, *rest = source_inputs(case, generator)
    return f0[:, :: int(case.parameters["scale"])].contiguous(), initial - 0.5, *rest


def held_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """Sines [rows, frames, harmonics], f0 [rows, frames], noise, linear, None, settings."""
    f0, _, noise, *linear, lengths, scale, _, amplitude, std, threshold = stepped_inputs(case, generator)
    sines = torch.sin(100 * torch.rand(*f0.shape, noise.shape[2], generator=generator, device=generator.device))
    return sines, f0, noise, *linear, lengths, scale, amplitude, std, threshold


OPERATIONS: dict[str, Operation] = {
    "adain_conv_block": Operation(
        Block, block_inputs, "an AdaIN residual block", flop=block_flop, precision="tf32", of_modules=True
    ),
    "snake_conv_block": Operation(
        HiftBlock,
        hift_block_inputs,
        "a residual block with Snake",
        flop=block_flop,
        precision="tf32",
        of_modules=True,
    ),
    "snake": Operation(SnakePass(), snake_inputs, "bias, residual and Snake of a convolution"),
    "stft_polar": Operation(stft_polar, stft_inputs, "an STFT to magnitude and phase", compared=as_complex),
    "istft_polar": Operation(istft_polar, istft_inputs, "an inverse STFT from a spectral head", timed="wall"),
    "sine_source": Operation(sine_source, source_inputs, "a harmonic source"),
    "stepped_source": Operation(stepped_source, stepped_inputs, "a harmonic source without interpolation"),
    "held_source": Operation(held_source, held_inputs, "a harmonic source of sines held for a frame"),
}
