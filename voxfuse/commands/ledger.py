"""``voxfuse ledger``: list, explain, recompute, find stale verdicts, render."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from voxfuse._terminal import plain, table_console
from voxfuse.evidence import ledger as records_on_file
from voxfuse.evidence import listing, render, stale, why
from voxfuse.fusions.registry import FUSIONS, fusion
from voxfuse.patches import registry
from voxfuse.patches.guards import installed_version
from voxfuse.patches.policy import compute_capability
from voxfuse.profiles.environment import capture_environment
from voxfuse.recompute import inconsistency, recompute
from voxfuse.records import Fusion, GateVerdict, MicroVerdict

PASS, FAIL, ENVIRONMENT = 0, 1, 2
PAGE = "EVIDENCE.md"
Outcome = Literal["win", "neutral", "loss", "wrong", "pass", "fail", "inconclusive", "not-judged"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Folder = Annotated[Path | None, typer.Option(help="This folder instead of the shipped ledger and VOXFUSE_LEDGER.")]
Gpu = Annotated[str | None, typer.Option(help="Compute capability (9.0), or a part of the GPU's name (h200).")]


@app.callback()
def list_ledger(
    context: typer.Context,
    name: Annotated[str | None, typer.Option("--fusion", help="Only verdicts of this fusion.")] = None,
    stack: Annotated[str | None, typer.Option(help="Only verdicts on this stack.")] = None,
    gpu: Gpu = None,
    verdict: Annotated[Outcome | None, typer.Option(help="Only this outcome (micro: against the eager chain).")] = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """The verdicts on file, oldest first; the commands below explain, check and render them.

    Exit status: 0, or 1 where recompute finds a dishonest verdict or stale a stale one, 2 usage or environment.
    """
    if context.invoked_subcommand is not None:
        given = [name, stack, gpu, verdict, folder, as_json or None]
        if any(value is not None for value in given):
            raise typer.BadParameter(f"options go after {context.invoked_subcommand!r}, not before it")
        return
    if name is not None:
        _known(name)
    folders, narrowed = _folders(folder), listing.Filter(name, stack, gpu, verdict)
    rows = listing.rows(folders, narrowed)
    if as_json:
        _print_json([row._asdict() for row in rows])
    else:
        listing.show(rows, folders, narrowed != listing.Filter())


@app.command(name="why")
def explain(
    name: Annotated[str, typer.Argument(metavar="FUSION", help="The fusion to explain.")],
    stack: Annotated[str | None, typer.Option(help="Only on this stack; default: all that the fusion patches.")] = None,
    gpu: Gpu = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Why is a fusion on or off by default on this GPU, or on another one?"""
    known = _known(name)
    if stack is not None and stack not in known.stacks:
        raise typer.BadParameter(f"{name} patches {', '.join(known.stacks)}, not {stack}", param_hint="--stack")
    entries = records_on_file.load(_folders(folder))
    capability = compute_capability() if gpu is None else _capability(gpu, entries)
    found = []
    for target in known.stacks if stack is None else (stack,):
        found.append(why.explain(known, target, _release(target, entries), capability, entries))
    if as_json:
        _print_json([item._asdict() | {"acceptance": item.acceptance._asdict()} for item in found])
        return
    console = table_console()
    for item in found:
        place = f"compute capability {capability}" if capability else "a CPU"
        on = item.acceptance.accepted and capability is not None  # no default turns anything on without a GPU
        state = "[green]on[/]" if on else "[red]off[/]"
        console.print(f"{name} on {item.stack} {item.stack_version}, {place}: {state}", highlight=False)
        lines = [item.acceptance.reason]
        if capability is None:
            lines.insert(0, "no GPU here, and nothing is on without one; for a GPU on file: --gpu NAME")
        if known.graph and on:
            lines.append("a length without a graph runs upstream's code: warm up inside voxfuse.capturing()")
        if item.to_settle:
            where = "this GPU" if capability else "a GPU"
            lines.append(f"to settle it on {where}: {item.to_settle}")
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False)
        if item.grounds:
            table = Table("judge", "case", "GPU", "outcome", "detail", "file")
            for ground in item.grounds:
                table.add_row(*(plain(cell) for cell in ground._replace(file=Path(ground.file).name)))
            console.print(table)


@app.command(name="recompute")
def compute_again(
    files: Annotated[list[Path] | None, typer.Argument(help="Records; default: the whole ledger.")] = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Compute micro verdicts again from the samples they carry, and say which do not follow. Gates: gate --score-only.

    Exit status 1 where one does not follow from its samples, or cannot be read.
    """
    rows = []
    for path in files or list(records_on_file.files(_folders(folder))):
        try:
            verdict = records_on_file.read(path)
        except (OSError, ValueError, RecursionError) as error:
            rows.append({"file": str(path), "state": "unreadable", "detail": str(error)})
            continue
        if isinstance(verdict, GateVerdict):
            detail = "a gate is computed again from its run directory: voxfuse gate --score-only --out DIR"
            rows.append({"file": str(path), "state": "gate", "detail": detail})
            continue
        fault = inconsistency(verdict)
        if fault is None and recompute(verdict) != verdict:
            fault = "an interval differs from the bootstrap of its samples"
        rows.append({"file": str(path), "state": "differs" if fault else "same", "detail": fault or _ratios(verdict)})
    _show(rows, ("file", "state", "detail"), "Recomputed", as_json)
    raise typer.Exit(FAIL if any(row["state"] in ("differs", "unreadable") for row in rows) else PASS)


@app.command(name="stale")
def find_stale(gpu: Gpu = None, folder: Folder = None, as_json: Json = False) -> None:
    """Verdicts whose torch, Triton or kernels are not those here. They still decide; judge again to renew them.

    Exit status 1 where there are some.
    """
    entries = records_on_file.load(_folders(folder))
    capability = compute_capability() if gpu is None else _capability(gpu, entries)
    found = stale.stale(entries, capture_environment(), capability)
    rows = [
        {
            "subject": records_on_file.subject(item.entry.verdict),
            "case": records_on_file.case(item.entry.verdict),
            "gpu": item.entry.verdict.environment.gpu or "CPU",
            "changes": "; ".join(item.changes),
        }
        for item in found
    ]
    place = f"compute capability {capability}" if capability else "a CPU"
    _show(rows, ("subject", "case", "gpu", "changes"), f"Stale verdicts of {place}", as_json)
    raise typer.Exit(FAIL if rows else PASS)


@app.command(name="render")
def render_page(
    out: Annotated[Path, typer.Option(help="The page; links are relative to its folder.")] = Path(PAGE),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; status 1 where it is not current.")] = False,
) -> None:
    """Write EVIDENCE.md from the shipped records: wins and losses alike."""
    try:
        text = page(out.absolute().parent)
    except ValueError as error:
        message = f"the shipped records do not lie below {out.absolute().parent}: run this in a checkout's root"
        raise typer.BadParameter(message, param_hint="--out") from error
    current = out.read_text(encoding="utf-8") if out.is_file() else None
    if check:
        print(f"{out} is current" if current == text else f"{out} is not current: voxfuse ledger render")
        raise typer.Exit(PASS if current == text else FAIL)
    out.write_text(text, encoding="utf-8")
    print(f"written: {out}")


def page(base: Path) -> str:
    """The content of EVIDENCE.md in a folder. Raises ValueError where the shipped records lie elsewhere."""
    return render.render(records_on_file.load([records_on_file.SHIPPED]), FUSIONS.values(), base)


def _known(name: str) -> Fusion:
    try:
        return fusion(name)
    except KeyError as error:
        raise typer.BadParameter(str(error.args[0])) from error


def _folders(folder: Path | None) -> tuple[Path, ...]:
    if folder is None:
        return records_on_file.folders()
    if not folder.is_dir():
        print(f"voxfuse ledger: {folder} is not a folder", file=sys.stderr)
        raise typer.Exit(ENVIRONMENT)
    return (folder,)


def _capability(gpu: str, entries: Sequence[records_on_file.Entry]) -> str | None:
    """The compute capability that ``--gpu`` means: itself, or that of the GPUs on file with such a name."""
    if gpu.replace(".", "", 1).isdigit():
        return gpu
    found = {e.verdict.environment.compute_capability for e in entries if listing.on_gpu(e.verdict, gpu)}
    if len(found) != 1:
        names = sorted({entry.verdict.environment.gpu or "CPU" for entry in entries})
        problem = "no GPU on file has" if not found else "GPUs of several compute capabilities have"
        message = f"{problem} {gpu!r} in its name; on file: {', '.join(names) or 'none'}; or give a compute capability"
        raise typer.BadParameter(message, param_hint="--gpu")
    return found.pop()


def _release(stack: str, entries: Sequence[records_on_file.Entry]) -> str:
    """The stack's installed release; where it is not installed, the one that was gated last; else a tested one."""
    patches = registry.patches_of(stack)
    installed = None if patches is None else installed_version(patches.distribution)
    gated = [
        e.verdict.stack_version for e in entries if isinstance(e.verdict, GateVerdict) and e.verdict.stack == stack
    ]
    tested = list(patches.sources) if patches is not None else []
    return installed or next(iter([*gated[::-1], *tested[::-1]]), "unknown")


def _ratios(verdict: MicroVerdict) -> str:
    if verdict.wrong is not None:
        return f"wrong: {verdict.wrong}"
    return ", ".join(f"{ratio.verdict} {ratio.median:.2f}× {ratio.baseline}" for ratio in verdict.ratios)


def _show(rows: Sequence[dict[str, str]], columns: Sequence[str], title: str, as_json: bool) -> None:
    if as_json:
        _print_json(list(rows))
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(plain(row[column]) for column in columns))
    table_console().print(table if rows else f"{title}: none")


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))
