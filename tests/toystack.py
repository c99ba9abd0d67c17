"""A small upstream package, written to a folder, with a stack of patches for it: what the patch engine is tested on."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from voxfuse.fusions.registry import FUSIONS
from voxfuse.kernels._op import Run, fused_op
from voxfuse.patches import registry
from voxfuse.patches.guards import resolve, source_sha256
from voxfuse.patches.spec import Patch, StackPatches
from voxfuse.records import Contract, Fusion

_numbers = itertools.count()

LAYERS = """
import torch
from torch import nn


def gain(x, factor):
    return x * factor


class Norm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels) + 0.5)
        self.register_buffer("floor", torch.tensor(1e-6))

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.floor).sqrt() * self.scale

    def extra_repr(self):
        return f"channels={self.scale.numel()}"


class Strict(nn.Module):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError(f"expected float32, got {x.dtype}")
        return x + torch.rand_like(x) if self.training else x.square()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = Norm(channels)
        self.proj = nn.Linear(channels, channels)

    def _residual(self, x):
        return self.proj(self.norm(x))

    def forward(self, x):
        return x + self._residual(x)


class Voice(nn.Module):
    def __init__(self, channels=8, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(channels) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return gain(x, 2.0)
"""

USER = """
from .layers import gain as louder


def speak(x):
    return louder(x, 3.0)
"""

LAZY = """
from .layers import gain


def __getattr__(name):
    raise RuntimeError(f"this module computes {name} on demand")
"""


def _reference(x: torch.Tensor, floor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + floor).sqrt() * scale


def _unsupported(x: torch.Tensor, floor: torch.Tensor, scale: torch.Tensor) -> str | None:
    return None if x.dtype == torch.float32 else f"dtype is {x.dtype}, expected float32"


@fused_op(
    "toy_rms_norm",
    "(Tensor x, Tensor floor, Tensor scale) -> Tensor",
    reference=_reference,
    unsupported=_unsupported,
    fake=lambda x, floor, scale: torch.empty_like(x),
)
def toy_rms_norm(x: torch.Tensor, floor: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Stands in for a kernel: an equivalent formula in another order of operations."""
    return x * (scale * torch.rsqrt(x.square().mean(-1, keepdim=True) + floor))


def fused_norm(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
        return toy_rms_norm(x, self.floor, self.scale, run=run)

    return fused


def fused_residual(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.proj(toy_rms_norm(x, self.norm.floor, self.norm.scale, run=run))

    return fused


def fused_gain(original: Callable[..., Any], run: Run) -> Callable[..., Any]:
    def fused(x: torch.Tensor, factor: float) -> torch.Tensor:
        return original(x, factor)

    return fused


def toy_fusion(name: str, contract: Contract = "same-precision") -> Fusion:
    return Fusion(
        name=name, stacks=("toyvoice",), operations=("norm",), contract=contract, envelope="float32", kernels=()
    )


class ToyStack:
    """The package ``name`` (modules ``layers``, ``user``, ``lazy``), release 1.2, and its stack ``toyvoice``."""

    def __init__(self, folder: Path, version: str = "1.2") -> None:
        self.name = f"toyvoice{next(_numbers)}"
        self.folder = folder / "site"
        package = self.folder / self.name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        for module, text in (("layers", LAYERS), ("user", USER), ("lazy", LAZY)):
            (package / f"{module}.py").write_text(text)
        self.release(version)
        self.norm_target = f"{self.name}.layers:Norm.forward"
        self.residual_target = f"{self.name}.layers:Block._residual"
        self.gain_target = f"{self.name}.layers:gain"

    def release(self, version: str) -> None:
        """Pretend that another release is installed."""
        metadata = self.folder / f"{self.name}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {version}\n")

    def register(self, monkeypatch: Any, version: str = "1.2") -> None:
        """Make it known, with its fusions; ``toy_norm`` alone is in use until ``use`` says otherwise."""
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(self.folder))
        for fusion in (toy_fusion("toy_norm"), toy_fusion("toy_residual"), toy_fusion("toy_gain", "bitwise")):
            monkeypatch.setitem(FUSIONS, fusion.name, fusion)
        monkeypatch.setattr(registry, "KNOWN_STACKS", (*registry.KNOWN_STACKS, "toyvoice"))
        self.use(self.patch("toy_norm", self.norm_target, fused_norm), version=version)

    def patch(self, fusion: str, target: str, build: Any, absorbs: tuple[str, ...] = ()) -> Patch:
        return Patch(fusion=FUSIONS[fusion], target=target, absorbs=(target, *absorbs), build=build)

    def use(self, *patches: Patch, version: str = "1.2", sources: dict[str, dict[str, str]] | None = None) -> None:
        """Let the stack consist of these patches, tested with the sources as they are now (or as given)."""
        if sources is None:
            self.load()
            sources = {
                version: {name: source_sha256(resolve(name).function) for patch in patches for name in patch.absorbs}
            }
        stack = StackPatches(
            name="toyvoice",
            distribution=self.name,
            modules=(f"{self.name}.layers",),
            load=self.load,
            sources=sources,
            patches=patches,
        )
        self._monkeypatch.setitem(registry.STACKS, "toyvoice", lambda: stack)

    @property
    def all_patches(self) -> tuple[Patch, ...]:
        """``toy_norm`` is absorbed by ``toy_residual``; the function has a patch of its own."""
        return (
            self.patch("toy_norm", self.norm_target, fused_norm),
            self.patch("toy_residual", self.residual_target, fused_residual, (self.norm_target,)),
            self.patch("toy_gain", self.gain_target, fused_gain),
        )

    def load(self) -> None:
        importlib.import_module(f"{self.name}.layers")

    @property
    def layers(self) -> ModuleType:
        return importlib.import_module(f"{self.name}.layers")

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{name}")

    def voice(self) -> nn.Module:
        return self.layers.Voice().eval()

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == self.name]:
            del sys.modules[name]
