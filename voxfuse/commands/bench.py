"""``voxfuse bench``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.table import Table

from voxfuse._terminal import plain, table_console
from voxfuse.e2e.options import checked_device, checked_folder, refuse_ignored
from voxfuse.evidence import ledger
from voxfuse.kernels import _tuned
from voxfuse.kernels._op import Run
from voxfuse.microbench import bench as micro
from voxfuse.microbench import plots, tune
from voxfuse.microbench.cases import JudgedCase
from voxfuse.microbench.timer import clock_for
from voxfuse.profiles.environment import capture_environment
from voxfuse.recompute import MAX_PAIRS, VOXFUSE
from voxfuse.records import MicroVerdict, Ratio

PASS, FAIL, ENVIRONMENT, INCONCLUSIVE = 0, 1, 2, 3
COLOURS = {"win": "green", "neutral": "yellow", "loss": "red"}


def bench(
    context: typer.Context,
    fusions: Annotated[list[str] | None, typer.Argument(help="Fusions to judge; default: all that have cases.")] = None,
    stack: Annotated[str | None, typer.Option(help="Only the cases of this stack.")] = None,
    case: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    pairs: Annotated[int, typer.Option(min=30, max=MAX_PAIRS, help="Pairs per case: 30 carry a 95 % interval.")] = 50,
    budget: Annotated[float | None, typer.Option(min=0, help="Minutes after which no case begins.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of records; what it holds is not judged again.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG; default: bench.png beside the records.")] = None,
    tune_options: Annotated[bool, typer.Option("--tune", help="Find launch options instead; writes --table.")] = False,
    table: Annotated[Path, typer.Option(help="Table of launch options that --tune writes.")] = _tuned.PATH,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts (or tuned rows) as JSON.")] = False,
) -> None:
    """Judge fusions shape by shape: eager chain, torch.compile, peers and voxfuse, interleaved; errors before speeds.

    Exit status: 0 every case judged, 1 a fusion is wrong, 2 usage or environment, 3 a CPU, unsound controls or out of
    time. A loss is a verdict, not a failure.
    """
    where = torch.device(checked_device(device))
    try:
        cases = micro.choose(fusions or (), stack, case)
    except KeyError as error:
        raise typer.BadParameter(str(error.args[0])) from error
    if tune_options:
        used = {"fusions", "device", "pairs", "tune_options", "table", "as_json"}
        refuse_ignored(context, "--tune", used)
        raise typer.Exit(_tune(tuple(fusions or ()), where, pairs, table, as_json))
    refuse_ignored(context, "bench without --tune", {name for name in context.params if name != "table"})
    folder = checked_folder(out or Path("runs") / f"bench-{where.type}", "--out")
    picture = plot or folder / "bench.png"
    checked_folder(picture.parent, "--plot")
    deadline = float("inf") if budget is None else time.monotonic() + 60 * budget
    try:
        plan = micro.bench_for(where, pairs, lambda: deadline - time.monotonic())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        done = list(judge_into(folder, cases, plan))
        _report(done, folder, picture, as_json, plan.dry)
    except OSError as error:  # a full disk, a folder that none may write
        print(f"voxfuse bench: {error}", file=sys.stderr)
        raise typer.Exit(ENVIRONMENT) from error
    except KeyboardInterrupt:
        print(f"voxfuse bench: interrupted; {folder} keeps what was judged: repeat the command", file=sys.stderr)
        raise typer.Exit(ENVIRONMENT) from None
    raise typer.Exit(status(done, plan.dry))


def judge_into(folder: Path, cases: Sequence[JudgedCase], plan: micro.Bench) -> Iterator[micro.Judged]:
    """Judge cases (on a CPU: a tiny one per fusion) with their records in a folder; progress goes to stderr."""
    cases = micro.tiny(cases) if plan.dry else cases
    entries = ledger.load([folder]) if folder.exists() else []
    verdicts = [entry.verdict for entry in entries if isinstance(entry.verdict, MicroVerdict)]
    there = micro.reusable(verdicts, capture_environment(micro.PACKAGES), plan.dry)
    for index, judged in enumerate(micro.run(cases, plan, there, lambda verdict: ledger.append(verdict, folder)), 1):
        name = f"{judged.case.fusion}, {judged.case.case.name}"
        print(f"[{index}/{len(cases)}] {name}: {judged.outcome}", file=sys.stderr, flush=True)
        yield judged


def status(done: Iterable[micro.Judged], dry: bool) -> int:
    """The exit status of judged cases."""
    outcomes = {judged.outcome for judged in done}
    if "wrong" in outcomes:
        return FAIL
    return INCONCLUSIVE if dry or outcomes & {"unsound", "missing"} else PASS


def _report(done: Sequence[micro.Judged], folder: Path, plot: Path, as_json: bool, dry: bool) -> None:
    verdicts = [judged.verdict for judged in done if judged.verdict is not None]
    drawn = ""
    try:
        if verdicts:
            plots.draw(verdicts, plot)
            drawn = f"; picture: {plot}"
    except ImportError as error:
        print(f"voxfuse bench: no picture: {error}", file=sys.stderr)
    if as_json:
        rows = [
            {"fusion": j.case.fusion, "case": j.case.case.name, "outcome": j.outcome, "verdict": _plain(j.verdict)}
            for j in done
        ]
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    table_console().print(verdict_table(done))
    if dry:
        print("a dry run on a CPU, on tiny shapes: nothing is claimed")
    print(f"records: {folder}{drawn}")


def _plain(verdict: MicroVerdict | None) -> object:
    return None if verdict is None else json.loads(msgspec.json.encode(verdict))


def verdict_table(done: Iterable[micro.Judged]) -> Table:
    """One row per case: times, speed-ups with intervals, fraction of the speed of light, and why arms are absent."""
    table = Table(title="Micro verdicts; ratios above 1: voxfuse is faster", title_justify="left")
    for column in ("fusion", "case", "voxfuse µs", "against eager", "against torch.compile", "best peer", "of light"):
        table.add_column(column, justify="right" if column in ("voxfuse µs", "of light") else "left")
    for judged in done:
        verdict, name = judged.verdict, plain(judged.case.case.name)
        if verdict is None or verdict.wrong is not None:
            text = "not reached" if verdict is None else f"[red]WRONG[/], no speed: {plain(verdict.wrong or '')}"
            table.add_row(judged.case.fusion, name, "", text, "", "", "")
            continue
        ratios = {ratio.baseline: ratio for ratio in verdict.ratios}
        absent = {arm.name: arm.absent for arm in verdict.arms if arm.absent}
        peers = [ratio for ratio in verdict.ratios if ratio.baseline not in ("eager", "compile")]
        best = min(peers, key=lambda ratio: ratio.median, default=None)
        table.add_row(
            judged.case.fusion,
            name + (" (controls unsound)" if judged.outcome == "unsound" else ""),
            f"{micro.medians_us(verdict)[VOXFUSE]:.1f}",
            *(_ratio(ratios.get(arm), absent.get(arm)) for arm in ("eager", "compile")),
            f"{best.baseline}: {_ratio(best, None)}" if best else f"none of {len(absent.keys() - {'compile'})}",
            f"{verdict.speed_of_light:.2f}",
        )
    return table


def _ratio(ratio: Ratio | None, absent: str | None) -> str:
    if ratio is None:
        return f"absent: {plain(absent or 'not run')}"
    interval = plain(f"[{ratio.low:.2f}, {ratio.high:.2f}]")
    return f"[{COLOURS[ratio.verdict]}]{ratio.verdict}[/] {ratio.median:.2f}× {interval}"


def _tune(fusions: tuple[str, ...], device: torch.device, pairs: int, table: Path, as_json: bool) -> int:
    """Tune the operations of some fusions and write what won; the exit status."""
    if device.type == "cpu":
        raise typer.BadParameter("launch options are tuned on a GPU: the reference has none", param_hint="--tune")
    if not table.parent.is_dir() or not os.access(table.parent, os.W_OK) or table.is_dir():
        raise typer.BadParameter(f"{table} cannot be written: name another table", param_hint="--table")
    try:
        operations = tune.operations_of(fusions)
        plan = micro.bench_for(device, pairs, lambda: float("inf"))
    except (KeyError, ValueError) as error:
        raise typer.BadParameter(str(error.args[0])) from error
    clock, environment = clock_for(device), capture_environment()
    rows = []
    for operation in operations:
        for tuned in tune.tune(operation, clock, device, Run(plan.backend, "tune"), environment, pairs):
            best = min(tuned.microseconds, key=tuned.microseconds.__getitem__)
            kept = "stays" if tuned.row is None else f"gives way to {tuned.row.options}"
            print(
                f"{operation}, {tuned.shape_class}: {tuned.incumbent} {tuned.microseconds[tune.INCUMBENT]:.2f} µs "
                f"{kept}; fastest {best} {tuned.microseconds[best]:.2f} µs; refused: {tuned.refused or 'none'}",
                file=sys.stderr,
                flush=True,
            )
            rows += [] if tuned.row is None else [tuned.row]
    if rows:
        _tuned.write(rows, table)
    if as_json:
        print(json.dumps([json.loads(msgspec.json.encode(row)) for row in rows], indent=1))
    else:
        print(f"{len(rows)} rows written to {table}" if rows else f"nothing is faster than what {table} holds")
    return PASS
