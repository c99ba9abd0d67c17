"""``voxfuse hotspots``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from voxfuse._terminal import table_console
from voxfuse.fusions.registry import FUSIONS
from voxfuse.profiles.analyse import NOISE, analyse_files
from voxfuse.profiles.report import ReportUnavailable, write_report
from voxfuse.profiles.tables import SHOWN, show
from voxfuse.profiles.trace import TraceError
from voxfuse.records import HotspotReport, to_json

USAGE_OR_ENVIRONMENT = 2
TABLE_COLUMNS = 200  # of a table that goes to a file or pipe
MENDABLE = (TraceError, OSError, ReportUnavailable)


def hotspots(
    traces: Annotated[list[Path], typer.Argument(help="Chrome traces of torch.profiler (.json, .json.gz).")],
    mapping: Annotated[
        Path | None, typer.Option(help="Trace of the same work without CUDA graphs: where replayed kernels come from.")
    ] = None,
    stack: Annotated[str, typer.Option(help="Match fusions of this stack only; default: of all.")] = "",
    noise: Annotated[float, typer.Option(min=0, max=1, help="Gain that cannot be told from noise.")] = NOISE,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = SHOWN,
    out: Annotated[Path | None, typer.Option(help="Folder for hotspots.json and report.html.")] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Whether --out gets report.html.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Rank what profiled processes spend their time on by what fusing it could give end to end.

    Exit status: 0 done, 2 usage or environment (a trace that is broken, or not of steady work, included).
    """
    if stack and stack not in (stacks := sorted({name for fusion in FUSIONS.values() for name in fusion.stacks})):
        message = f"no fusions for {stack!r}; stacks with fusions: {', '.join(stacks)}"
        raise typer.BadParameter(message, param_hint="--stack")
    with errors("hotspots"), reading() as notify:
        processes = analyse_files(traces, stack=stack, mapping=mapping, noise=noise, notify=notify)
        report = HotspotReport(stack=stack, workload={}, noise=noise, environment=None, processes=processes)
        if out is not None:
            write_report(report, out, page)
    present(report, as_json, top)


def present(report: HotspotReport, as_json: bool, top: int) -> None:
    """A report on stdout, as JSON or tables."""
    if as_json:
        sys.stdout.write(to_json(report).decode())
    else:
        show(report, table_console(TABLE_COLUMNS), top)


@contextlib.contextmanager
def errors(command: str, more: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What the user can mend ends with a message and status 2; faults of ours keep their traceback."""
    mendable: tuple[type[Exception], ...] = (*MENDABLE, *more)
    try:
        yield
    except mendable as error:
        print(f"voxfuse {command}: {error}", file=sys.stderr)
        raise typer.Exit(USAGE_OR_ENVIRONMENT) from error
    except KeyboardInterrupt:
        print(f"voxfuse {command}: interrupted", file=sys.stderr)
        raise typer.Exit(USAGE_OR_ENVIRONMENT) from None


@contextlib.contextmanager
def reading() -> Iterator[Callable[[int], None]]:
    """Events read so far, on stderr."""
    columns = (
        TextColumn("reading traces"),
        BarColumn(),
        TextColumn("{task.completed:.0f} events"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        yield lambda events: progress.update(task, completed=events)
