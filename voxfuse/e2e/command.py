"""``voxfuse gate``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from voxfuse._terminal import table_console
from voxfuse.e2e.asr import EMBEDDED, AsrMissing, Nobody, Transcriber, WhisperTranscriber
from voxfuse.e2e.gate import EXIT_STATUS, NothingApplied, generate, run_gate, show
from voxfuse.e2e.generate import Notify
from voxfuse.e2e.options import checked_device, checked_folder, refuse_ignored
from voxfuse.e2e.peak_memory import MeasurementFailed, measure_peak_memory
from voxfuse.e2e.protocol import load_protocol
from voxfuse.e2e.rundir import RunDirectory, RunMismatch
from voxfuse.e2e.score import score
from voxfuse.e2e.stack import WeightsMissing
from voxfuse.e2e.stacks import driver
from voxfuse.e2e.texts import load_texts
from voxfuse.fusions.registry import fusion
from voxfuse.patches.errors import PatchError
from voxfuse.records import GateVerdict, to_json

if TYPE_CHECKING:
    from voxfuse.patches.patchset import PatchSet

USAGE_OR_ENVIRONMENT = 2
MENDABLE = (
    RunMismatch,
    WeightsMissing,
    AsrMissing,
    NothingApplied,
    PatchError,
    MeasurementFailed,
    ImportError,
    OSError,
)
BackendName = Literal["triton", "interpreter", "reference"]


def gate(
    context: typer.Context,
    stack: Annotated[str, typer.Option(help="Stack to judge.")] = "kokoro",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    protocol: Annotated[str, typer.Option(help="smoke, full, or the path of a protocol file.")] = "smoke",
    sentences: Annotated[int | None, typer.Option(min=1, help="Speak so many texts instead of the protocol's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; an interrupted run in it is resumed.")] = None,
    generate_only: Annotated[bool, typer.Option(help="Speak, do not score: that can happen elsewhere.")] = False,
    score_only: Annotated[bool, typer.Option(help="Score what --out holds; no stack is loaded.")] = False,
    extend: Annotated[bool, typer.Option(help="With --generate-only: speak the protocol's one extension.")] = False,
    model_dir: Annotated[Path | None, typer.Option(help="Folder with the stack's own weights.")] = None,
    backend: Annotated[
        BackendName | None, typer.Option(help="How fused operations run; default: triton on cuda, reference on cpu.")
    ] = None,
    fusions: Annotated[str | None, typer.Option(help="Fusions to judge, separated by commas; default: all.")] = None,
    asr: Annotated[str, typer.Option(help="ASR: tiny.en (embedded), a CTranslate2 Whisper folder, a name.")] = EMBEDDED,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge a stack's fusions end to end: same texts and seeds untouched and patched, compared, transcribed, timed.

    Exit status: 0 pass, 1 fail, 2 usage or environment, 3 inconclusive or not judged (on a CPU at best).
    """
    if generate_only and score_only:
        raise typer.BadParameter("--generate-only and --score-only exclude each other")
    if score_only:  # the run directory says all else; where it is not named, stack and device name it
        names_folder = {"stack", "device"} if out is None else set()
        refuse_ignored(context, "--score-only", {"score_only", "out", "asr", "as_json"} | names_folder)
    if extend and not generate_only:
        raise typer.BadParameter("--extend goes with --generate-only; a whole gate extends by itself")
    if device is None or not (
        score_only and device.startswith("cuda")
    ):  # a run spoken on a GPU may be scored without one
        device = checked_device(device)
    backend = backend or ("triton" if device.startswith("cuda") else "reference")
    directory = checked_folder(out or Path("runs") / f"gate-{stack}-{device.replace(':', '-')}", "--out")
    with _errors(directory), progress() as notify:
        if score_only:
            run = RunDirectory.open(directory)
            verdict: GateVerdict | None = score(run, listener(run.header.unintelligible, asr), notify)
        else:
            transcriber = None if generate_only else listener(wordless(stack, model_dir), asr)  # first: may be missing
            speak_into = speaker(stack, device, protocol, sentences, directory, model_dir, backend, fusions, notify)
            verdict = None
            if transcriber is None:
                speak_into(extend)
            else:
                verdict = run_gate(speak_into, transcriber, notify)
    if verdict is None:
        print(f"spoken into {directory}; to score it: voxfuse gate --score-only --out {directory}")
        return
    if as_json:
        sys.stdout.write(to_json(verdict).decode())
    else:
        show(verdict, table_console())
        print(f"verdict: {directory / 'verdict.json'}")
    raise typer.Exit(EXIT_STATUS[verdict.verdict])


def wordless(stack_name: str, model_dir: Path | None) -> str | None:
    """Why no words can be heard of a stack without its weights, or None; told without loading it."""
    if model_dir is not None:
        return None
    with contextlib.suppress(ValueError):  # an unknown stack: ``speaker`` says so
        return getattr(driver(stack_name), "unintelligible", None)
    return None


def listener(silent: str | None, asr: str) -> Transcriber:
    """The ASR, or nobody where the audio has no words. Raises as WhisperTranscriber does."""
    return WhisperTranscriber(asr) if silent is None else Nobody()


def speaker(
    stack_name: str,
    device: str,
    protocol: str,
    sentences: int | None,
    directory: Path,
    model_dir: Path | None,
    backend: str,
    fusions: str | None,
    notify: Notify,
) -> Callable[[bool], RunDirectory]:
    """Load the stack; gives the function that speaks, with or without the protocol's extension.

    Raises typer.BadParameter for an unknown stack, protocol or fusion, or more sentences than there are texts.
    """
    from voxfuse import apply_patches

    names = [name.strip() for name in fusions.split(",")] if fusions else None
    try:
        stack = driver(stack_name)
        declared = load_protocol(protocol, sentences)
        texts = load_texts(declared.protocol.sentences)
        for name in names or ():
            fusion(name)
    except (ValueError, KeyError) as error:
        raise typer.BadParameter(str(error.args[0])) from error
    notify(f"loading {stack_name}", 0, 1)
    stack.load(device, model_dir)
    notify(f"loading {stack_name}", 1, 1)

    covered: Sequence[str] | None = names or getattr(stack, "fusions", None)

    def apply(left_out: tuple[str, ...]) -> PatchSet:
        include = None if covered is None else [name for name in covered if name not in left_out]
        return apply_patches(
            stack.name, include=include, exclude=left_out, policy="all", backend=backend, strict=names is not None
        )

    def speak_into(extend: bool) -> RunDirectory:
        return generate(
            stack,
            apply,
            declared,
            texts,
            directory,
            notify,
            device=device,
            backend=backend,
            extend=extend,
            measure_memory=lambda run: measure_peak_memory(run, model_dir),
        )

    return speak_into


@contextlib.contextmanager
def _errors(directory: Path) -> Iterator[None]:
    """What the user can mend ends with a message and status 2; faults of ours keep their traceback."""
    try:
        yield
    except MENDABLE as error:
        print(f"voxfuse gate: {error}", file=sys.stderr)
        raise typer.Exit(USAGE_OR_ENVIRONMENT) from error
    except KeyboardInterrupt:
        print(f"voxfuse gate: interrupted; {directory} keeps what was measured: repeat the command", file=sys.stderr)
        raise typer.Exit(USAGE_OR_ENVIRONMENT) from None


@contextlib.contextmanager
def progress() -> Iterator[Notify]:
    """Progress bars on stderr, one per phase."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def notify(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
            bars.update(tasks[phase], completed=done, total=total)

        yield notify
