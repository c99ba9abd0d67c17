"""How a case of a fusion becomes input sets and arms. A new kernel adds one entry to ``OPERATIONS``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch

from voxfuse.fusions.registry import fusion
from voxfuse.kernels._op import Run
from voxfuse.kernels.adain import adain_act
from voxfuse.microbench import conv_arms, decode_arms, decode_step_arms, peers, step_arms, vocoder_arms
from voxfuse.microbench.ceilings import copy_bytes_per_s, rotation
from voxfuse.microbench.judge import NO_MORE_THAN_EAGER, Contest, compulsory_bytes
from voxfuse.microbench.operation import Arms, Judged, Operation, around, smooth
from voxfuse.microbench.timer import Clock, Inputs
from voxfuse.records import Case

# A dry run on a CPU claims nothing: there convolutions of another layout sum in another order, and were seen 1.4 times
# as wrong as the eager chain's.
TIMES_EAGER_ON_A_CPU = 4.0


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


OPERATIONS: dict[str, Operation] = {
    "adain_snake": Operation(adain_act, adain_inputs, "AdaIN with Snake"),
    "adain_leaky_relu": Operation(adain_act, adain_inputs, "AdaIN with LeakyReLU"),
    **vocoder_arms.OPERATIONS,
    **conv_arms.OPERATIONS,
    **decode_arms.OPERATIONS,
    **step_arms.OPERATIONS,
    **decode_step_arms.OPERATIONS,
}


def operation_of(fusion_name: str, case: Case) -> Operation:
    """What is judged at a case of a fusion, which may have several kernels.

    Raises KeyError where nobody has said how it is judged.
    """
    name = str(case.parameters.get("operation", fusion_name))
    if name not in OPERATIONS:
        raise KeyError(f"no micro arms for {name!r}; add an entry to voxfuse.microbench.arms.OPERATIONS")
    return OPERATIONS[name]


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

    ``ceilings`` are the machine's, as ``machine_ceilings`` gives them; the copy bandwidth at the case's footprint is
    measured here. Forgets what torch.compile has compiled so far: each case is compiled for its shape.
    Raises KeyError where nobody has said how the fusion is judged.
    """
    operation = operation_of(fusion_name, case)
    op = operation.op
    if operation.of_modules:
        op = cast(Callable[[Case, torch.device], Judged], op)(case, device)
    op = cast(Judged, op)
    generator = torch.Generator(device).manual_seed(seed)
    first = operation.inputs(case, generator)
    footprint = compulsory_bytes(first, op.reference(*first))
    sets = [first, *(operation.inputs(case, generator) for _ in range(rotation(footprint, device) - 1))]
    torch.compiler.reset()
    others = Arms({}, {}) if operation.arms is None else operation.arms(op, run, compile_backend)
    flop = 0 if operation.flop is None else operation.flop(case)
    bounds = {**ceilings, "copy_bytes_per_s": copy_bytes_per_s(clock, footprint, device)}
    if flop:
        bounds["flop_per_s"] = ceilings[f"peak_{operation.precision}_flop_per_s"]
    plain = operation.compilable or op.reference
    compiled = torch.compile(plain, dynamic=False, fullgraph=True, backend=compile_backend)
    return Contest(
        fusion=fusion(fusion_name),
        case=case,
        sets=sets,
        eager=op.reference,
        voxfuse=partial(op, run=run),
        baselines={"compile": compiled, **peers.arms(operation.peers, operation.what), **others.baselines},
        ceilings=bounds,
        flop=flop,
        compared=operation.compared,
        counted=others.counted,
        times_eager=NO_MORE_THAN_EAGER if device.type != "cpu" else TIMES_EAGER_ON_A_CPU,
    )
