"""The command line. Results go to stdout, progress and messages to stderr.

Exit status of every command: 0 pass, 1 fail, 2 usage or environment (a crash included: it is no verdict),
3 inconclusive or not judged.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from voxfuse._version import VERSION

PASS, ENVIRONMENT = 0, 2

app = typer.Typer(
    name="voxfuse",
    help="Fused Triton kernels for open text-to-speech stacks, every gain proven.",
    epilog="Exit status: 0 pass, 1 fail, 2 usage or environment, 3 inconclusive or not judged.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class _Verbatim(typer.core.TyperCommand):
    """Leaves its arguments as they are, ``--`` included, for a command that is loaded only when it is called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return ctx.args


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"voxfuse {VERSION}")
        raise typer.Exit(PASS)


@app.callback()
def voxfuse(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of ``voxfuse`` itself; the help text is the app's."""


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine can run, which fusions are on, and why not the others. Status 2: something needs repair."""
    from voxfuse import doctor

    diagnosis = doctor.examine()
    if as_json:
        from voxfuse.records import to_json

        typer.echo(to_json(diagnosis), nl=False)
    else:
        doctor.show(diagnosis)
    raise typer.Exit(ENVIRONMENT if diagnosis.problems else PASS)


@app.command(name="ledger")
def list_ledger(
    folder: Annotated[
        Path | None, typer.Option(help="List this folder instead of the shipped ledger and VOXFUSE_LEDGER.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the verdicts on file, oldest first."""
    from voxfuse.evidence import ledger, listing

    if folder is not None and not folder.is_dir():
        typer.echo(f"voxfuse ledger: {folder} is not a folder", err=True)
        raise typer.Exit(ENVIRONMENT)
    folders = ledger.folders() if folder is None else (folder,)
    rows = listing.rows(folders)
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=1, ensure_ascii=False))
    else:
        listing.show(rows, folders)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def gate(context: typer.Context) -> None:
    """Speak, transcribe and judge a stack, untouched against patched. ``voxfuse gate --help`` lists the options."""
    from voxfuse.e2e.command import gate

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(gate)
    command(context.args, prog_name="voxfuse gate")


@app.command(cls=_Verbatim, add_help_option=False)
def hotspots(context: typer.Context) -> None:
    """Rank what profiled processes spend time on by what fusing it could give. ``--help`` lists the options."""
    from voxfuse.profiles.command import hotspots

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(hotspots)
    command(context.args, prog_name="voxfuse hotspots")


@app.command(cls=_Verbatim, add_help_option=False)
def profile(context: typer.Context) -> None:
    """Profile a stack, or any command, and rank its hotspots. ``voxfuse profile --help`` lists the options."""
    from voxfuse.e2e.profile_command import profile

    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(profile)
    command(context.args, prog_name="voxfuse profile")


def main() -> None:
    """Entry point of the ``voxfuse`` command."""
    try:
        app()
    except Exception:
        traceback.print_exc()
        sys.exit(ENVIRONMENT)


if __name__ == "__main__":
    main()
