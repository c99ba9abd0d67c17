"""``voxfuse judge``: profile a stack, bench the fusions that match, gate those that win, write the ledger."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table

from voxfuse._terminal import plain, table_console
from voxfuse.commands import bench as bench_command
from voxfuse.commands.gate_sets import gate_sets, worth_gating
from voxfuse.commands.hotspots import matched_fusions
from voxfuse.commands.judge_state import Content, State, StateMismatch
from voxfuse.e2e import command as gate_command
from voxfuse.e2e.asr import EMBEDDED
from voxfuse.e2e.gate import run_gate
from voxfuse.e2e.generate import Notify
from voxfuse.e2e.options import checked_device, checked_folder
from voxfuse.e2e.protocol import load_protocol
from voxfuse.evidence import acceptance, ledger
from voxfuse.fusions.registry import FUSIONS
from voxfuse.microbench import bench as micro
from voxfuse.patches import registry
from voxfuse.patches.guards import installed_version
from voxfuse.patches.policy import compute_capability
from voxfuse.profiles.environment import capture_environment
from voxfuse.recompute import MAX_PAIRS
from voxfuse.records import GateVerdict, MicroVerdict

PASS, FAIL, ENVIRONMENT, INCONCLUSIVE = 0, 1, 2, 3


class OutOfTime(RuntimeError):
    """The budget is spent; what was measured is kept."""


class Settled(NamedTuple):
    """One fusion at the end: whether ``apply_patches()`` turns it on from now on, and why."""

    fusion: str
    accepted: bool
    reason: str


class Outcome(NamedTuple):
    """What a run came to. ``unfinished`` says what the budget did not reach."""

    note: str
    judged: tuple[micro.Judged, ...]
    gates: tuple[GateVerdict, ...]
    settled: tuple[Settled, ...]
    unfinished: tuple[str, ...]


def judge(
    stack: Annotated[str, typer.Option(help="Stack whose fusions are judged.")],
    budget: Annotated[float, typer.Option(min=0, help="Minutes; repeat the command to go on.")] = 60.0,
    state: Annotated[Path | None, typer.Option(help="Folder that keeps what was measured.")] = None,
    ledger_folder: Annotated[
        Path | None, typer.Option("--ledger", help="Where verdicts go; default: VOXFUSE_LEDGER, else the state folder.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (a dry run) or cuda; default: cuda if there is one.")] = None,
    protocol: Annotated[str, typer.Option(help="The gate's: full decides, smoke does not.")] = "full",
    sentences: Annotated[int | None, typer.Option(min=1, help="Speak so many texts instead of the protocol's.")] = None,
    pairs: Annotated[int, typer.Option(min=30, max=MAX_PAIRS, help="Pairs per micro case.")] = 50,
    case: Annotated[
        str | None, typer.Option(help="Only micro cases whose name contains this; verdicts then rest on these alone.")
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Folder with the stack's own weights.")] = None,
    asr: Annotated[str, typer.Option(help="ASR, as for voxfuse gate.")] = EMBEDDED,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Settle what should be on for a stack on this GPU: profile, bench, gate, and write the verdicts to the ledger.

    Exit status: 0 settled and at least one fusion is on, 1 settled with none on, or one is wrong or fails the gate,
    2 usage or environment, 3 not settled yet (out of time, inconclusive, or a CPU).
    """
    deadline = time.monotonic() + 60 * budget
    where = checked_device(device)
    known = tuple(sorted(name for name, fusion in FUSIONS.items() if stack in fusion.stacks))
    if not known:
        stacks = sorted({name for fusion in FUSIONS.values() for name in fusion.stacks})
        raise typer.BadParameter(
            f"no fusions for {stack!r}; stacks with fusions: {', '.join(stacks)}", param_hint="--stack"
        )
    try:
        driver = gate_command.driver(stack)  # without one it ends before the gate, after all the benches
    except ValueError as error:
        message = f"{error}; shape by shape its fusions are judged by voxfuse bench --stack {stack}"
        raise typer.BadParameter(message, param_hint="--stack") from error
    reached = getattr(driver, "fusions", known)
    if beyond := [name for name in known if name not in reached]:
        print(f"voxfuse judge: the driver of {stack} does not run {', '.join(beyond)}: not judged", file=sys.stderr)
    known = tuple(name for name in known if name in reached)
    if case is not None:  # a name that was mistyped costs a profile and a gate otherwise
        try:
            micro.choose([name for name in known if not FUSIONS[name].graph], stack, case)
        except KeyError as error:
            raise typer.BadParameter(error.args[0], param_hint="--case") from error
    folder = checked_folder(state or Path("runs") / f"judge-{stack}-{where.replace(':', '-')}", "--state")
    book = checked_folder(
        ledger_folder or Path(os.environ.get(ledger.USER_FOLDER_VARIABLE) or folder / "ledger"), "--ledger"
    )

    def left() -> float:
        return deadline - time.monotonic()

    try:
        plan = micro.bench_for(torch.device(where), pairs, left)
        content = Content(
            stack=stack,
            stack_version=_release(stack),
            device=where,
            backend=plan.backend,
            protocol_sha256=load_protocol(protocol, sentences).sha256,
            pairs=pairs,
            environment=capture_environment(micro.PACKAGES),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        opened = State.open(folder, content)

        def speak(names: tuple[str, ...], notify: Notify) -> GateVerdict:
            transcriber = gate_command.listener(gate_command.wordless(stack, model_dir), asr)  # first: may be missing
            into, fusions = opened.gate_folder(names), ",".join(names)
            speak_into = gate_command.speaker(
                stack, where, protocol, sentences, into, model_dir, plan.backend, fusions, notify
            )
            return run_gate(speak_into, transcriber, notify)

        outcome = run(opened, known, plan, book, speak, case)
    except (StateMismatch, *gate_command.MENDABLE) as error:
        print(f"voxfuse judge: {error}", file=sys.stderr)
        raise typer.Exit(ENVIRONMENT) from error
    except KeyboardInterrupt:
        print(f"voxfuse judge: interrupted; {folder} keeps what was measured: repeat the command", file=sys.stderr)
        raise typer.Exit(ENVIRONMENT) from None
    _report(outcome, book, folder, as_json, plan.dry)
    raise typer.Exit(status(outcome, plan.dry))


Speak = Callable[[tuple[str, ...], Notify], GateVerdict]


def run(
    state: State, known: tuple[str, ...], plan: micro.Bench, book: Path, speak: Speak, case: str | None = None
) -> Outcome:
    """All steps that are not done yet, as far as the time reaches; verdicts go into ``book`` as they come."""
    stack = state.content.stack
    unfinished: list[str] = []
    fusions, note = state.content.matched, state.content.note
    if fusions is None:
        print(f"voxfuse judge: profiling {stack}, for {plan.left() / 4:.0f} s at most", file=sys.stderr, flush=True)
        found = matched_fusions(stack, state.content.device, state.folder / "profile", known, plan.left() / 4)
        fusions, note = found.fusions, found.note
        if not found.again:
            state.matched(fusions, note)
    print(f"voxfuse judge: {note}", file=sys.stderr)
    judged: tuple[micro.Judged, ...] = ()
    timed = [name for name in fusions if not FUSIONS[name].graph]  # of graphs the gate's blocks tell the speed
    try:
        cases = micro.choose(timed, stack, case) if timed else []
    except KeyError as error:  # nobody has said how these are judged shape by shape; the rule then refuses them
        print(f"voxfuse judge: {error.args[0]}", file=sys.stderr)
        cases = []
    if cases:
        judged = tuple(bench_command.judge_into(state.folder / "records", cases, plan))
    unfinished += [f"bench of {item.case.fusion}, {item.case.case.name}" for item in judged if item.verdict is None]
    for item in judged:
        if item.verdict is not None:
            _keep(item.verdict, book)
    gates: list[GateVerdict] = []
    patches = registry.patches_of(stack)
    sets = gate_sets(worth_gating(fusions, judged, plan.dry), patches.patches if patches else (), plan.backend)
    for group in sets if not unfinished else ():
        verdict = state.verdict_of(group)
        if verdict is None:
            try:
                if plan.left() <= 0:  # loading a stack to speak nothing
                    raise OutOfTime
                with gate_command.progress() as notify:
                    verdict = speak(group, _within(plan.left, notify))
            except OutOfTime:
                unfinished.append(f"gate of {', '.join(group)}")
                continue
            state.gated(group, verdict)
        _keep(verdict, book)
        gates.append(verdict)
    entries = ledger.load(path for path in dict.fromkeys((*ledger.folders(), book)) if path.is_dir())
    settled = []
    for name in fusions:
        found_by_rule = acceptance.accepted(
            FUSIONS[name], stack, state.content.stack_version, compute_capability(), entries
        )
        settled.append(Settled(name, found_by_rule.accepted, found_by_rule.reason))
    return Outcome(note, judged, tuple(gates), tuple(settled), tuple(unfinished))


def status(outcome: Outcome, dry: bool) -> int:
    """The exit status; what fails fails whatever else is missing."""
    if any(item.outcome == "wrong" for item in outcome.judged) or any(gate.verdict == "fail" for gate in outcome.gates):
        return FAIL
    unsettled = outcome.unfinished or not outcome.settled or any(item.outcome == "unsound" for item in outcome.judged)
    if dry or unsettled or any(gate.verdict != "pass" for gate in outcome.gates):
        return INCONCLUSIVE
    return PASS if any(item.accepted for item in outcome.settled) else FAIL


def _within(left: Callable[[], float], notify: Notify) -> Notify:
    """The same progress, which ends the gate between two outputs once the time is spent."""

    def checked(phase: str, done: int, total: int) -> None:
        notify(phase, done, total)
        if left() < 0 and done < total:
            raise OutOfTime

    return checked


def _keep(verdict: MicroVerdict | GateVerdict, book: Path) -> None:
    with contextlib.suppress(FileExistsError):  # a resumed run wrote it before
        ledger.append(verdict, book)


def _release(stack: str) -> str:
    patches = registry.patches_of(stack)
    return (None if patches is None else installed_version(patches.distribution)) or "not installed"


def _report(outcome: Outcome, book: Path, folder: Path, as_json: bool, dry: bool) -> None:
    if as_json:
        rows = [{"fusion": j.case.fusion, "case": j.case.case.name, "outcome": j.outcome} for j in outcome.judged]
        gates = [{"fusions": g.fusions, "verdict": g.verdict, "reasons": g.reasons} for g in outcome.gates]
        settled = [item._asdict() for item in outcome.settled]
        report = {"note": outcome.note, "micro": rows, "gates": gates, "settled": settled}
        print(json.dumps({**report, "unfinished": outcome.unfinished, "ledger": str(book)}, indent=1))
        return
    console = table_console()
    if outcome.judged:
        console.print(bench_command.verdict_table(outcome.judged))
    for gate in outcome.gates:
        reasons = "; ".join(gate.reasons)
        console.print(plain(f"gate of {', '.join(gate.fusions)}: {gate.verdict}  {reasons}"), highlight=False)
    table = Table("fusion", "apply_patches()", "why", title="Settled", title_justify="left")
    for item in outcome.settled:
        table.add_row(item.fusion, "[green]on" if item.accepted else "[red]off", plain(item.reason))
    console.print(table)
    if dry:
        print("a dry run on a CPU: it settles nothing, and what is on follows other GPUs' verdicts")
    for line in _next_steps(outcome, book, folder):
        print(line)


def _next_steps(outcome: Outcome, book: Path, folder: Path) -> Iterator[str]:
    if outcome.unfinished:
        more = f" and {len(outcome.unfinished) - 1} more" if len(outcome.unfinished) > 1 else ""
        yield f"out of time before: {outcome.unfinished[0]}{more}; {folder} keeps the rest: repeat the command"
    yield f"verdicts: {book}"
    if book not in ledger.folders():
        yield f"for them to count: export {ledger.USER_FOLDER_VARIABLE}={book.absolute()}"
