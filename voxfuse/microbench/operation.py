"""What a judged operation is, and how real-looking inputs are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from voxfuse.kernels._op import Run
from voxfuse.microbench.peers import Peer
from voxfuse.microbench.timer import Call, Inputs
from voxfuse.records import Case, TensorSignature


class Judged(Protocol):
    """A fused call beside the eager chain that it stands for; a ``FusedOp`` is one."""

    @property
    def reference(self) -> Callable[..., Any]:
        """The exact upstream chain, in fp64 too."""

    def __call__(self, *args: Any, run: Run) -> Any:
        """The fused call."""


class Arms(NamedTuple):
    """Further arms of a case, or why one is absent, and what of each arm is captured to count its launches."""

    baselines: Mapping[str, Call | str]
    counted: Mapping[str, Call]


@dataclass(frozen=True)
class Operation:
    """A judged operation: its fused call (made for a case and a device where it holds modules), how its inputs are made
    (on the generator's device), and its peers.

    ``what`` names the operation where a library has none. ``flop`` counts the arithmetic of a call that could be bound
    by it (None: memory bounds it at every shape), in ``precision``, one of ``ceilings.MATMULS``. ``timed`` "wall" is
    for an eager chain that waits for the device and so cannot be captured, and where the host's time is what is saved.
    ``compared`` maps an output to what is held against the oracle, where different outputs mean the same.
    ``compilable`` is what torch.compile gets where the eager chain waits for the device: the same outputs without
    waits. ``arms`` makes further arms of what was made for a case, with the fused call's run and the compiler's
    backend; one named ``compile`` stands in place of the usual.
    """

    op: Judged | Callable[[Case, torch.device], Judged]
    inputs: Callable[[Case, torch.Generator], Inputs]
    what: str
    peers: tuple[Peer, ...] = ()
    flop: Callable[[Case], int] | None = None
    precision: str = "fp32"
    of_modules: bool = False
    timed: Literal["graph", "wall"] = "graph"
    compared: Callable[[torch.Tensor], torch.Tensor] | None = None
    compilable: Callable[..., torch.Tensor] | None = None
    arms: Callable[[Any, Run, str], Arms] | None = None


def smooth(signature: TensorSignature, generator: torch.Generator) -> torch.Tensor:
    """What a convolution leaves: noise low-passed over the last axis, each channel at its own level and scale.

    Channels are the second to last axis. Strides are the signature's.
    """
    device = generator.device
    shape = signature.shape
    noise = torch.randn(*shape[:-1], shape[-1] + 8, generator=generator, device=device)
    low = F.avg_pool1d(noise.flatten(0, -3), kernel_size=9, stride=1).view(shape)
    fine = torch.randn(shape, generator=generator, device=device)
    per_channel = (*([1] * (len(shape) - 2)), shape[-2], 1)
    scale = torch.exp(0.5 * torch.randn(per_channel, generator=generator, device=device))
    level = torch.randn(per_channel, generator=generator, device=device)
    values = (3 * low + 0.3 * fine) * scale + level
    strided = torch.empty_strided(shape, signature.strides, dtype=getattr(torch, signature.dtype), device=device)
    return strided.copy_(values)


def around(center: float, spread: float, signature: TensorSignature, generator: torch.Generator) -> torch.Tensor:
    """Parameters: normal with that mean and standard deviation, contiguous."""
    values = torch.randn(signature.shape, generator=generator, device=generator.device)
    return (center + spread * values).to(getattr(torch, signature.dtype))
