"""Ahead-of-time compilation for GPUs that this machine does not have: registers, spills, shared memory, instructions.

``compile_ahead`` starts one Python process without TRITON_INTERPRET (a kernel decorated under the interpreter cannot be
compiled) that compiles every request and prints what it found.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Request:
    """One kernel, as ``module:function``; ``signature`` gives Triton types (``*fp32``, ``i32``) of its arguments.

    ``constants`` are constexpr values by argument name (also ``None`` pointers and strides of 1); ``patterns`` are
    regular expressions to be counted in the generated PTX or AMD assembly; ``aligned`` names pointers and integers that
    divide by 16, as nearly all do: without it no load is wide.
    """

    kernel: str
    signature: dict[str, str]
    constants: dict[str, int | float | bool | str | tuple[float, ...] | None]
    warps: int
    target: str
    patterns: tuple[str, ...] = ()
    options: dict[str, int | bool] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What the compiler made: 32-bit registers a thread, bytes of spilled registers, shared bytes, pattern counts."""

    registers: int
    spills: int
    shared: int
    counts: dict[str, int]


def compile_ahead(requests: list[Request]) -> list[Compiled]:
    """Compile every request in one subprocess. Raises AssertionError with the compiler's output where one fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps([asdict(request) for request in requests]),
            env=environment | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert run.returncode == 0, run.stderr[-4000:]
    return [Compiled(**found) for found in json.loads(run.stdout.splitlines()[-1])]


def _compile(request: dict) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = request["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    signature = {
        argument: "constexpr" if argument in request["constants"] else request["signature"][argument]
        for argument in (parameter.name for parameter in kernel.params)
    }
    constants = {name: tuple(v) if isinstance(v, list) else v for name, v in request["constants"].items()}  # from JSON
    target = request["target"]
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    options = {"num_warps": request["warps"], **request["options"]}
    names = [parameter.name for parameter in kernel.params]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in request["aligned"]}
    source = ASTSource
    if hasattr(kernel, "is_gluon") and kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source  # its frontend has no public name
    compiled = triton.compile(source(kernel, signature, constants, attributes), target=gpu, options=options)
    assembly = compiled.asm["ptx" if gpu.backend == "cuda" else "amdgcn"]
    if gpu.backend == "cuda":
        usage = _cuda_usage(compiled.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
        registers, spills = usage["REG"], usage["LOCAL"] + usage["STACK"]
    else:
        registers = int(re.search(r"\.vgpr_count:\s*(\d+)", assembly)[1])
        spills = 4 * sum(int(found) for found in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", assembly))
    counts = {pattern: len(re.findall(pattern, assembly)) for pattern in request["patterns"]}
    return {"registers": registers, "spills": spills, "shared": compiled.metadata.shared, "counts": counts}


def _cuda_usage(cubin: bytes, cuobjdump: Path) -> dict[str, int]:
    """Registers, stack and local bytes of a thread. ptxas keeps spilled registers on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(cuobjdump), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", listing)}


if __name__ == "__main__":
    print(json.dumps([_compile(request) for request in json.load(sys.stdin)]))
