"""``voxfuse profile``: a stack's driver, or any command, under the profiler, and what its hotspots are."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
import typer

from voxfuse.e2e.options import checked_device, checked_folder
from voxfuse.e2e.stack import Stack, WeightsMissing
from voxfuse.e2e.stacks import driver
from voxfuse.e2e.texts import load_texts
from voxfuse.fusions.graph_runner import capturing
from voxfuse.patches.errors import PatchError
from voxfuse.profiles import capture, follow, tensorboard
from voxfuse.profiles.analyse import NOISE, analyse_files
from voxfuse.profiles.capture import Request, Stage
from voxfuse.profiles.command import errors, present, reading
from voxfuse.profiles.environment import capture_environment
from voxfuse.profiles.nvml import NvmlSampler, current_gpu
from voxfuse.profiles.report import require_plots, write_report
from voxfuse.profiles.tables import SHOWN
from voxfuse.records import HotspotReport

SEED = 0
STDERR = 2  # what a command prints goes there: stdout is for the report
PLAIN_ROUNDS = 2  # before and after the profiled one, without a profiler
MENDABLE = (WeightsMissing, PatchError, ImportError)


def profile(
    command: Annotated[list[str] | None, typer.Argument(help="After --: any command instead of a stack.")] = None,
    stack: Annotated[str | None, typer.Option(help="Stack to profile, by its own driver.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Texts of the gate to speak, one at a time.")] = 4,
    patched: Annotated[bool, typer.Option("--patched", help="With all of the stack's fusions applied.")] = False,
    backend: Annotated[
        Literal["triton", "interpreter", "reference"] | None,
        typer.Option(help="With --patched: how fused operations run; default: triton on cuda, reference on cpu."),
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Folder with the stack's own weights.")] = None,
    skip: Annotated[float, typer.Option(min=0, help="With a command: seconds of warm-up after torch's import.")] = 30.0,
    record: Annotated[float, typer.Option(min=0.1, help="With a command: seconds to record.")] = 5.0,
    mapping: Annotated[Path | None, typer.Option(help="Trace of the same work without CUDA graphs.")] = None,
    noise: Annotated[float, typer.Option(min=0, max=1, help="Gain that cannot be told from noise.")] = NOISE,
    out: Annotated[Path | None, typer.Option(help="Folder for trace, hotspots.json and report.html.")] = None,
    log_folder: Annotated[bool, typer.Option("--tensorboard", help="Also write a log folder for TensorBoard.")] = False,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = SHOWN,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Draw report.html (needs matplotlib).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Trace a steady workload and rank its hotspots by what fusing them could give end to end.

    Exit status: 0 done, 2 usage or environment (work that is not steady included).
    """
    if (stack is None) == (not command):
        raise typer.BadParameter("give either --stack NAME or, after --, a command")
    folder = checked_folder(out or Path("runs") / f"profile-{stack or 'command'}", "--out")
    where = checked_device(device)
    with errors("profile", MENDABLE):
        if page:
            require_plots()
        if stack is None:
            traces = _run(command or [], folder, skip, record)
            report = HotspotReport(
                stack="",
                workload={"command": " ".join(command or [])},
                noise=noise,
                environment=None,
                processes=(),
                overhead=follow.overhead(traces),
            )
            components: dict[str, str] = {}
        else:
            report, stages = _speak(stack, where, sentences, patched, backend, model_dir, folder, noise)
            components = {stage.name: stage.component for stage in stages}
            traces = [folder / "trace.json.gz"]
        with reading() as notify:
            processes = analyse_files(
                traces, stack=report.stack, mapping=mapping, noise=noise, components=components, notify=notify
            )
        report = msgspec.structs.replace(report, processes=processes)
        for trace in traces if log_folder else ():
            tensorboard.export(trace, folder / "tensorboard")
        written = write_report(report, folder, page)
    present(report, as_json, top)
    print("written:", *traces, *written, sep="\n  ", file=sys.stderr)


def _speak(
    name: str,
    device_name: str,
    sentences: int,
    patched: bool,
    backend: Literal["triton", "interpreter", "reference"] | None,
    model_dir: Path | None,
    folder: Path,
    noise: float,
) -> tuple[HotspotReport, Sequence[Stage]]:
    """Warm up, time the work without the profiler, trace it, time it again; the report has no process yet."""
    try:
        stack = driver(name)
        texts = load_texts(sentences)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    device = torch.device(device_name)
    _say(f"loading {name} on {device}")
    stack.load(device_name, model_dir)
    requests: list[Request] = [(text.id, functools.partial(stack.synthesize, text, SEED)) for text in texts]
    stages = _stages(stack)
    with _patches(stack, patched, backend or ("triton" if device.type == "cuda" else "reference")):
        _say(f"warming up on {len(texts)} texts")
        with capturing():
            capture.run(requests, device)
        plain = [sum(capture.run(requests, device).walls_s) for _ in range(PLAIN_ROUNDS)]
        _say("recording")
        outer = next((stage.name for stage in stages if not stage.module), None)
        with capture.marked(stack.model, stages), NvmlSampler(current_gpu()) as sampler:
            recording = capture.record(requests, device, folder / "trace.json.gz", outer)
            begin, end = recording.starts[0], recording.starts[-1] + recording.walls_s[-1]
        plain += [sum(capture.run(requests, device).walls_s) for _ in range(PLAIN_ROUNDS)]
    samples = [sample for sample in sampler.samples if begin <= sample.at <= end]
    figures = set.intersection(*(set(sample.values) for sample in samples)) if samples else set()
    series = {figure: tuple(sample.values[figure] for sample in samples) for figure in sorted(figures)}
    profiled_s, plain_s = sum(recording.walls_s), statistics.median(plain)
    report = HotspotReport(
        stack=stack.name,
        workload={
            "stack": stack.name,
            "weights": stack.weights,
            "device": device_name,
            "texts": len(texts),
            "seed": SEED,
            "patched": patched,
            "concurrency": 1,
        },
        noise=noise,
        environment=capture_environment((stack.distribution,)),
        processes=(),
        overhead={"profiled_s": profiled_s, "plain_s": plain_s, "ratio": profiled_s / plain_s},
        samples=sampler.means(begin, end),
        throttled=sampler.throttled(begin, end),
        series={"at_s": tuple(sample.at - recording.starts[0] for sample in samples), **series} if samples else {},
    )
    return report, stages


def _stages(stack: Stack) -> Sequence[Stage]:
    """The stages that a driver declares; a driver that declares none is one stage."""
    return getattr(stack, "stages", (Stage("speech", "other"),))


def _patches(stack: Stack, patched: bool, backend: str) -> contextlib.AbstractContextManager[object]:
    if not patched:
        return contextlib.nullcontext()
    from voxfuse import apply_patches

    return apply_patches(stack.model, policy="all", backend=backend)


def _run(command: Sequence[str], folder: Path, skip_s: float, record_s: float) -> list[Path]:
    """Run a command whose Python processes record themselves. Raises OSError where none left a trace."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*trace-*.json.gz"), *folder.glob("calls-*.json")):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="voxfuse-profile-") as ours:
        environment = follow.environment(folder, Path(ours), skip_s, record_s, os.environ)
        process = subprocess.Popen(command, env=environment, stdout=STDERR)
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the command has it too; a server ends by it, with its trace written
            status = process.wait()
    traces = follow.wait_for_traces(folder, seconds=30)
    if not traces:
        raise OSError(
            f"no process of the command left a trace (its status: {status}): it must be Python with torch, and work "
            f"for longer than --skip {skip_s:g} s after importing it"
        )
    if status:
        _say(f"the command ended with status {status}; its traces are analysed all the same")
    return traces


def _say(text: str) -> None:
    print(f"voxfuse profile: {text}", file=sys.stderr)
