"""Arms of the convolutions of a Snake vocoder that run as one kernel each with what stands around them.

A case gives x [rows, channels, frames], channels last in memory as the kernel before leaves it, ``taps``, ``dilation``
and ``padding`` ("left": causal).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from voxfuse.kernels import conv1d_snake as single_file
from voxfuse.kernels import snake_conv_pair as pair_file
from voxfuse.kernels._hopper_conv import packed
from voxfuse.kernels._op import Run
from voxfuse.microbench.operation import Operation, smooth
from voxfuse.microbench.timer import Inputs
from voxfuse.records import Case


class _Parameters:
    """Random weights [2, out, taps, in], biases and alphas of two convolutions, in fp32 and fp64."""

    def __init__(self, case: Case, device: torch.device) -> None:
        channels, taps = case.tensors["x"].shape[1], int(case.parameters["taps"])
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)
        self.weights = normal(2, channels, taps, channels) / (channels * taps) ** 0.5
        self.biases, self.alphas = 0.1 * normal(2, channels), (0.3 * normal(2, channels)).exp()
        self.dilation = int(case.parameters["dilation"])
        self.before = taps - 1 if case.parameters.get("padding") == "left" else taps // 2
        self._doubles = {name: getattr(self, name).double() for name in ("weights", "biases", "alphas")}

    def of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A parameter in the type of x."""
        return self._doubles[name] if x.dtype == torch.float64 else getattr(self, name)  # type: ignore[no-any-return]


class SnakePair:
    """x + conv2(snake2(conv1(snake1(x)))): what one iteration of a residual block is."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._parameters = _Parameters(case, device)
        self._tiles = pair_file.packed_pair(self._parameters.weights)

    def _call(self, op: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        p = self._parameters
        alphas, biases = p.of("alphas", x), p.of("biases", x)
        snakes = alphas[0], biases[0], alphas[1], biases[1]
        y = op(x.transpose(1, 2), p.of("weights", x), self._tiles, *snakes, None, p.dilation, p.before, p.before)
        return y.transpose(1, 2)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Upstream's chain."""
        return self._call(pair_file.reference, x)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """One kernel."""
        return self._call(partial(pair_file.snake_conv_pair, run=run), *args)


class SnakeConv:
    """snake(conv(x) + bias + residual), the sum written too: what ends one iteration of a residual block. The residual
    is the input of the convolution: their bytes are counted once."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._parameters = _Parameters(case, device)
        self._tiles = packed(self._parameters.weights[1])

    def _call(self, op: Callable[..., tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        p, last = self._parameters, x.transpose(1, 2)
        bias, alpha = p.of("biases", x)[1], p.of("alphas", x)[1]
        _, y = op(
            last, p.of("weights", x)[1], self._tiles, None, bias, last, alpha, None, p.dilation, p.before, True
        )  # fmt: skip
        return y.transpose(1, 2)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Upstream's chain."""
        return self._call(single_file.reference, x)

    def __call__(self, *args: Any, run: Run) -> torch.Tensor:
        """One kernel."""
        return self._call(partial(single_file.conv1d_snake, run=run), *args)


def inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x [rows, channels, frames]."""
    return (smooth(case.tensors["x"], generator),)


def _flop(case: Case, convolutions: int) -> int:
    rows, channels, frames = case.tensors["x"].shape
    return convolutions * 2 * rows * frames * channels**2 * int(case.parameters["taps"])


OPERATIONS: dict[str, Operation] = {
    "snake_conv_pair": Operation(
        SnakePair,
        inputs,
        "a pair of convolutions with Snake",
        flop=partial(_flop, convolutions=2),
        precision="tf32",
        of_modules=True,
    ),
    "conv1d_snake": Operation(
        SnakeConv,
        inputs,
        "a convolution with residual and Snake",
        flop=partial(_flop, convolutions=1),
        precision="tf32",
        of_modules=True,
    ),
}
