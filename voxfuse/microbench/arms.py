"""How a case of a fusion becomes input sets and arms. A new kernel adds one entry to ``OPERATIONS``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from voxfuse.fusions.registry import fusion
from voxfuse.kernels._op import FusedOp, Run
from voxfuse.kernels.adain import adain_act
from voxfuse.kernels.gqa_decode import gqa_decode
from voxfuse.kernels.qk_norm_rope import qk_norm_rope
from voxfuse.kernels.rmsnorm import rms_norm
from voxfuse.kernels.swiglu import swiglu
from voxfuse.microbench.ceilings import copy_bytes_per_s, rotation
from voxfuse.microbench.judge import Contest, compulsory_bytes
from voxfuse.microbench.timer import Call, Clock, Inputs
from voxfuse.records import Case, TensorSignature


@dataclass(frozen=True)
class Operation:
    """A judged operation: its fused op, how its inputs are made (on the generator's device), and its peers.

    A peer is a call, or the reason why there is none.
    """

    op: FusedOp
    inputs: Callable[[Case, torch.Generator], Inputs]
    peers: Mapping[str, Call | str] = field(default_factory=dict)


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


def adain_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x, style, weight, bias, alpha (None without Snake), lengths (None), eps, slope: the arguments of adain_act."""
    tensors = case.tensors
    alpha = around(0.0, 0.3, tensors["alpha"], generator).exp() if "alpha" in tensors else None
    return (
        smooth(tensors["x"], generator),
        around(0.0, 0.3, tensors["style"], generator),
        around(1.0, 0.1, tensors["weight"], generator),
        around(0.0, 0.1, tensors["bias"], generator),
        alpha,
        None,
        float(case.parameters["eps"]),
        float(case.parameters["slope"]),
    )


def rms_norm_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """x, weight, eps, order: the arguments of rms_norm."""
    x = around(0.0, 1.0, case.tensors["x"], generator)
    weight = around(1.0, 0.3, case.tensors["weight"], generator)
    return x, weight, float(case.parameters["eps"]), str(case.parameters["order"])


def swiglu_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """gate and up, each a tensor of its own."""
    return tuple(around(0.0, 1.0, case.tensors[name], generator) for name in ("gate", "up"))


def qk_norm_rope_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """q, k, cos, sin, norm weights (or None), eps, order, and half-split pairs: the arguments of qk_norm_rope."""
    tensors = case.tensors
    q, k = (around(0.0, 1.0, tensors[name], generator) for name in ("q", "k"))
    angle = 3 * torch.randn(tensors["cos"].shape, generator=generator, device=generator.device)
    cos, sin = (table.to(getattr(torch, tensors["cos"].dtype)) for table in (angle.cos(), angle.sin()))
    weights = [around(1.0, 0.3, tensors[n], generator) if n in tensors else None for n in ("q_weight", "k_weight")]
    return q, k, cos, sin, *weights, float(case.parameters["eps"]), "cast_then_scale", "half", [], False, False


def gqa_decode_inputs(case: Case, generator: torch.Generator) -> Inputs:
    """q, k, v, no lengths (the whole cache is valid), no mask, scale, causal, window: the arguments of gqa_decode."""
    q, k, v = (around(0.0, 1.0, case.tensors[name], generator) for name in ("q", "k", "v"))
    return q, k, v, None, None, float(case.parameters["scale"]), True, 0


def liger(function: str, module: str, arguments: Callable[..., Inputs]) -> Call | str:
    """An autograd function of Liger-Kernel as a peer, or why there is none."""
    try:
        peer = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), function)
    except ImportError:
        return "liger-kernel is not installed"
    return lambda *inputs: peer.apply(*arguments(*inputs))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> torch.Tensor:
    """torch's own grouped-query attention, in gqa_decode's layout."""
    scale = others[2]
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[arg-type]
    return out.transpose(1, 2)


NO_PEER = {"peer": "no installable library has AdaIN with this activation"}
OPERATIONS: dict[str, Operation] = {
    "adain_snake": Operation(adain_act, adain_inputs, NO_PEER),
    "adain_leaky_relu": Operation(adain_act, adain_inputs, NO_PEER),
    "rms_norm": Operation(
        rms_norm,
        rms_norm_inputs,
        {"liger": liger("LigerRMSNormFunction", "rms_norm", lambda x, w, eps, _: (x, w, eps, 0.0, "llama", False))},
    ),
    "swiglu": Operation(
        swiglu, swiglu_inputs, {"liger": liger("LigerSiLUMulFunction", "swiglu", lambda gate, up: (gate, up))}
    ),
    "qk_norm_rope": Operation(
        qk_norm_rope, qk_norm_rope_inputs, {"peer": "no library fuses both with eager's roundings"}
    ),
    "gqa_attention": Operation(gqa_decode, gqa_decode_inputs, {"sdpa": sdpa}),
}


@torch.no_grad()
def contest(
    fusion_name: str,
    case: Case,
    device: torch.device,
    clock: Clock,
    run: Run,
    ceilings: Mapping[str, float],
    compile_backend: str = "inductor",
    seed: int = 0,
) -> Contest:
    """The contest of a fusion at a case: rotating inputs drawn from ``seed``, and the arms eager, compile and peers.

    ``ceilings`` are the machine's (``launch_floor_us``, ``peak_copy_bytes_per_s``); the copy bandwidth at the case's
    footprint is measured here. Forgets what torch.compile has compiled so far: each case is compiled for its shape.
    Raises KeyError where nobody has said how the fusion is judged.
    """
    if fusion_name not in OPERATIONS:
        raise KeyError(f"no micro arms for fusion {fusion_name!r}; add an entry to voxfuse.microbench.arms.OPERATIONS")
    operation = OPERATIONS[str(case.parameters.get("operation", fusion_name))]  # a fusion may have several kernels
    generator = torch.Generator(device).manual_seed(seed)
    first = operation.inputs(case, generator)
    footprint = compulsory_bytes(first, operation.op.reference(*first))
    sets = [first, *(operation.inputs(case, generator) for _ in range(rotation(footprint, device) - 1))]
    torch.compiler.reset()
    compiled = torch.compile(operation.op.reference, dynamic=False, fullgraph=True, backend=compile_backend)
    return Contest(
        fusion=fusion(fusion_name),
        case=case,
        sets=sets,
        eager=operation.op.reference,
        voxfuse=partial(operation.op, run=run),
        baselines={"compile": compiled, **operation.peers},
        ceilings={**ceilings, "copy_bytes_per_s": copy_bytes_per_s(clock, footprint, device)},
    )
