"""``voxfuse doctor``: what this machine can run, which fusions are on, and why not the others.

A *problem* is what needs repair: a version below the floor, a VOXFUSE variable that cannot be obeyed, a full disk, or,
on a machine that has a GPU, anything that keeps the ``triton`` backend from running or lets another user plant kernels.
A machine without a GPU is no problem: there the reference backend runs, so a missing Triton or C compiler is only
noted.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import warnings

import torch

import voxfuse
from voxfuse._version import VERSION
from voxfuse.doctor.findings import Finding, State
from voxfuse.doctor.folders import caches, disk, pth_file
from voxfuse.evidence import ledger
from voxfuse.evidence.stale import stale
from voxfuse.fusions.registry import FUSIONS
from voxfuse.kernels._op import backend_unavailable
from voxfuse.kernels._triton import TRITON_VERSION
from voxfuse.patches import PatchError, registry, switches
from voxfuse.patches.guards import installed_version
from voxfuse.patches.policy import compute_capability
from voxfuse.patches.spec import StackPatches
from voxfuse.profiles.environment import capture_environment
from voxfuse.profiles.nvml import driver_version
from voxfuse.records import MicroVerdict, Receipt, Record

FLOORS = {"Python": (3, 10), "torch": (2, 9), "Triton": (3, 5)}
VARIABLES = (
    "VOXFUSE",
    "VOXFUSE_BACKEND",
    "VOXFUSE_CACHE",
    "VOXFUSE_CAPTURE",
    "VOXFUSE_COMMIT",
    "VOXFUSE_FUSIONS",
    "VOXFUSE_LEDGER",
    "VOXFUSE_RECEIPTS",
    "VOXFUSE_STRICT",
)

# Distributions of known stacks that may have no patches yet; general libraries say nothing about what is spoken with.
UNPATCHED = {
    "qwen_tts": "qwen-tts",
    "mimi": "moshi",
    "dac": "descript-audio-codec",
    "bigvgan": "bigvgan",
    "vocos": "vocos",
    "sglang_omni": "sglang-omni",
    "vllm_omni": "vllm-omni",
}

WOULD_APPLY = "dry run: would apply"  # how the patch engine's dry run begins its reason


class Diagnosis(Record, frozen=True, kw_only=True):
    """All findings, and the receipts of a dry run of ``apply_patches()``: every fusion, on or why not."""

    findings: tuple[Finding, ...]
    receipts: tuple[Receipt, ...]

    @property
    def problems(self) -> list[Finding]:
        """The findings that need repair."""
        return [finding for finding in self.findings if finding.state == "problem"]


def examine() -> Diagnosis:
    """Look at this machine and process. Nothing is patched, compiled or downloaded."""
    findings = [_floor("Python", platform.python_version()), _floor("torch", str(torch.__version__))]
    findings += [*_gpu(), *_triton(), *_variables(), *caches(), disk(), pth_file(), *_stacks()]
    receipts: tuple[Receipt, ...] = ()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        entries = ledger.load()
        findings += [Finding(subject="ledger", value=f"{len(entries)} verdicts"), *_stale(entries)]
        if not any(finding.subject == VARIABLES[0] and finding.state == "problem" for finding in findings):
            try:
                receipts = tuple(voxfuse.apply_patches(dry_run=True).receipts)
                findings += _graphs(receipts)
            except PatchError as error:  # VOXFUSE_STRICT=1: what it refuses is a finding here
                advice = "unset VOXFUSE_STRICT to see every receipt"
                findings.append(Finding(subject="strict", value=str(error), state="problem", advice=advice))
    said = dict.fromkeys(str(warning.message) for warning in warned)
    findings += [Finding(subject="warning", value="", state="note", advice=message) for message in said]
    return Diagnosis(findings=tuple(findings), receipts=receipts)


def is_on(receipt: Receipt) -> bool:
    """Whether ``apply_patches()`` would apply the fusion of this dry run's receipt."""
    return (receipt.reason or "").startswith(WOULD_APPLY)


def show(diagnosis: Diagnosis) -> None:
    """Print a diagnosis as two tables: the findings, then every fusion of every stack."""
    from rich.table import Table

    from voxfuse._terminal import plain, table_console

    console = table_console()
    colours = {"ok": "green", "note": "yellow", "problem": "red"}
    table = Table("", "found", "state", "what to do", title=f"voxfuse {VERSION}")
    for finding in diagnosis.findings:
        state = f"[{colours[finding.state]}]{finding.state}"
        table.add_row(plain(finding.subject), plain(finding.value), state, plain(finding.advice))
    console.print(table)
    fusions = Table("stack", "fusion", "apply_patches()", "why", title="Fusions, as apply_patches() would leave them")
    rows = [
        (receipt.stack, receipt.fusion, "[green]on" if is_on(receipt) else receipt.status, receipt.reason or "")
        for receipt in diagnosis.receipts
    ]
    for stack, fusion, status, reason in dict.fromkeys(rows):  # a fusion of two targets, as a rule, once
        fusions.add_row(plain(stack), plain(fusion), status, plain(reason))
    console.print(fusions)


def _floor(name: str, version: str) -> Finding:
    floor = FLOORS[name]
    if _numbers(version) >= floor:
        return Finding(subject=name, value=version)
    least = ".".join(map(str, floor))
    return Finding(subject=name, value=version, state="problem", advice=f"unsupported: voxfuse needs {least} or newer")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _gpu() -> list[Finding]:
    """The GPUs that torch sees, or why it sees none where the driver is there."""
    driver = driver_version()
    if torch.cuda.is_available():
        driver_text = f"ROCm {torch.version.hip}" if torch.version.hip else f"driver {driver or 'unknown'}"
        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"compute capability {properties.major}.{properties.minor}"
            value = f"{properties.name}, {capability}, {properties.total_memory / 2**30:.0f} GiB, {driver_text}"
            found.append(Finding(subject=f"GPU {index}", value=value))
        return found
    if driver is None:
        advice = "kernels run on a GPU only; backend='reference' runs the same patches on a CPU"
        return [Finding(subject="GPU", value="none", state="note", advice=advice)]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    advice = f"torch sees no GPU (this is a {build} build): install a CUDA build, or check CUDA_VISIBLE_DEVICES"
    return [Finding(subject="GPU", value=f"driver {driver}", state="problem", advice=advice)]


def _triton() -> list[Finding]:
    """Triton, whether it is the release that this torch was built for, and the C compiler that its launches need."""
    hurts: State = "problem" if torch.cuda.is_available() else "note"
    if TRITON_VERSION is None:
        advice = "the triton backend cannot run: pip install triton"
        return [Finding(subject="Triton", value="not installed", state=hurts, advice=advice)]
    triton = _floor("Triton", TRITON_VERSION)
    paired = _paired_triton()
    if triton.state == "ok" and paired is not None and _numbers(paired) != _numbers(TRITON_VERSION):
        advice = f"this torch was built for Triton {paired}; others may miscompile: pip install triton=={paired}"
        triton = Finding(subject="Triton", value=TRITON_VERSION, state="note", advice=advice)
    missing = switches.toolchain_missing()
    if missing is None:
        compiler = Finding(subject="C compiler", value="found, with Python headers")
    else:
        compiler = Finding(subject="C compiler", value="not usable", state=hurts, advice=missing)
    unavailable = backend_unavailable("triton")
    if unavailable is None:
        return [triton, compiler, Finding(subject="backend triton", value="available")]
    return [triton, compiler, Finding(subject="backend triton", value="unavailable", state=hurts, advice=unavailable)]


def _paired_triton() -> str | None:
    """The Triton release that the installed torch declares, or None (CPU builds declare none)."""
    try:
        declared = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in declared:
        if match := re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*[=~]=\s*([\d.]+)", requirement):
            return match[1]
    return None


def _variables() -> list[Finding]:
    """Whether the VOXFUSE variables can be obeyed, each that is set, and TRITON_INTERPRET."""
    try:
        switches.read()
        found = []
    except ValueError as error:
        found = [Finding(subject="VOXFUSE", value="cannot be obeyed", state="problem", advice=str(error))]
    for name in sorted(name for name in os.environ if name.startswith("VOXFUSE") or name == "TRITON_INTERPRET"):
        if name in VARIABLES or name == "TRITON_INTERPRET":
            found.append(Finding(subject=name, value=os.environ[name]))
        else:
            advice = f"no such variable, ignored; known: {', '.join(VARIABLES)}"
            found.append(Finding(subject=name, value=os.environ[name], state="note", advice=advice))
    return found


def _graphs(receipts: tuple[Receipt, ...]) -> list[Finding]:
    """What the fusions that are on and replay graphs need before they gain anything."""
    names = dict.fromkeys(receipt.fusion for receipt in receipts if is_on(receipt) and FUSIONS[receipt.fusion].graph)
    if not names or switches.read().capture == "first_use":
        return []
    advice = (
        "warm up inside voxfuse.capturing(), or set VOXFUSE_CAPTURE=first_use: lengths without a graph run as before"
    )
    return [Finding(subject="graphs", value=", ".join(names), state="note", advice=advice)]


def _stale(entries: list[ledger.Entry]) -> list[Finding]:
    """Whether this GPU's verdicts were measured with other libraries or kernels. They still decide what is on."""
    capability = compute_capability()
    if capability is None:
        return []
    found = stale(entries, capture_environment(), capability)
    if not found:
        return [Finding(subject="stale verdicts", value="none on this GPU")]
    stacks = sorted({_stack_of(item.entry.verdict) for item in found})
    changes = list(dict.fromkeys(change for item in found for change in item.changes))
    advice = f"re-judge: {', '.join(f'voxfuse judge --stack {name}' for name in stacks)} ({'; '.join(changes)})"
    return [Finding(subject="stale verdicts", value=f"{len(found)} on this GPU", state="note", advice=advice)]


def _stack_of(verdict: ledger.Verdict) -> str:
    return verdict.case.stack if isinstance(verdict, MicroVerdict) else verdict.stack


def _import_error(stack: StackPatches) -> str | None:
    """Why a stack that is installed cannot be imported, or None: on a CPU the dry run never gets as far as that."""
    try:
        stack.load()
    except Exception as error:  # whatever a broken installation raises
        return f"{type(error).__name__}: {error}; its name patches nothing until that works"
    return None


def _stacks() -> list[Finding]:
    """Every stack that has patches: its installed release, whether it can be imported and is a tested one; and every
    other known one that is installed."""
    found = []
    for name, declare in registry.STACKS.items():
        stack = declare()
        version = installed_version(stack.distribution)
        tested = f"tested releases of {stack.distribution}: {', '.join(stack.sources)}"
        if version is None:
            found.append(Finding(subject=f"stack {name}", value="not installed", state="note", advice=tested))
        elif (obstacle := _import_error(stack)) is not None:
            value = f"{stack.distribution} {version}, cannot be imported"
            found.append(Finding(subject=f"stack {name}", value=value, state="note", advice=obstacle))
        elif version in stack.sources:
            found.append(Finding(subject=f"stack {name}", value=f"{stack.distribution} {version}, tested"))
        else:
            value = f"{stack.distribution} {version}, untested"
            found.append(Finding(subject=f"stack {name}", value=value, state="note", advice=tested))
    for name, distribution in UNPATCHED.items():
        if name not in registry.STACKS and (version := installed_version(distribution)) is not None:
            advice = "no patches for it in this version of voxfuse"
            found.append(
                Finding(subject=f"stack {name}", value=f"{distribution} {version}", state="note", advice=advice)
            )
    return found
