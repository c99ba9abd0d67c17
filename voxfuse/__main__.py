"""The command line. Results go to stdout, progress and messages to stderr.

Exit status of every command: 0 pass, 1 fail, 2 usage or environment (a crash included: it is no verdict),
3 inconclusive or not judged.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
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

# For commands whose module reads its own arguments.
DELEGATED: dict[str, Any] = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
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


@app.command(**DELEGATED)
def ledger(context: typer.Context) -> None:
    """The verdicts on file: list, explain (``why``), recompute, find stale ones, render EVIDENCE.md."""
    from voxfuse.commands.ledger import app

    _run(app, context)


@app.command(**DELEGATED)
def bench(context: typer.Context) -> None:
    """Judge fusions shape by shape: eager chain, torch.compile, peers, voxfuse; ``--tune`` finds launch options."""
    from voxfuse.commands.bench import bench

    _run(bench, context)


@app.command(**DELEGATED)
def gate(context: typer.Context) -> None:
    """Speak, transcribe and judge a stack, untouched against patched. ``voxfuse gate --help`` lists the options."""
    from voxfuse.e2e.command import gate

    _run(gate, context)


@app.command(**DELEGATED)
def judge(context: typer.Context) -> None:
    """Settle what should be on for a stack on this GPU: profile, bench, gate and write the ledger, within a budget."""
    from voxfuse.commands.judge import judge

    _run(judge, context)


def _run(command: Callable[..., None] | typer.Typer, context: typer.Context) -> None:
    """Run a command that is imported only now, so that asking for help loads neither torch nor a stack."""
    if not isinstance(command, typer.Typer):
        function, command = command, typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command()(function)
    command(context.args, prog_name=f"voxfuse {context.info_name}")


@app.command(cls=_Verbatim, add_help_option=False)
def hotspots(context: typer.Context) -> None:
    """Rank what profiled processes spend time on by what fusing it could give. ``--help`` lists the options."""
    from voxfuse.profiles.command import hotspots

    _run(hotspots, context)


@app.command(cls=_Verbatim, add_help_option=False)
def profile(context: typer.Context) -> None:
    """Profile a stack, or any command, and rank its hotspots. ``voxfuse profile --help`` lists the options."""
    from voxfuse.e2e.profile_command import profile

    _run(profile, context)


def main() -> None:
    """Entry point of the ``voxfuse`` command."""
    try:
        app()
    except Exception:
        traceback.print_exc()
        sys.exit(ENVIRONMENT)


if __name__ == "__main__":
    main()
