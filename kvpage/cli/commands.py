"""The commands and their options. Each does one thing and leaves the work to the library."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvpage import __version__
from kvpage.cli import pools
from kvpage.cli.output import prepare_streams, print_error
from kvpage.cli.planning import plan
from kvpage.cli.simulate import simulate
from kvpage.cli.top import top
from kvpage.errors import DeviceUnavailable, KvpageError, SpecInvalid

app = typer.Typer(
    name="kvpage",
    help="Plan, hold and share KV-cache page pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(pools.app, name="pools")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run() -> None:
    """Run the command line of this process. Errors are printed, not traced."""
    prepare_streams()
    try:
        app()
        sys.stdout.flush()
    except KvpageError as error:
        print_error(error)
        sys.exit(2 if isinstance(error, SpecInvalid) or error.http_status in (400, 413) else 1)
    except OSError as error:
        _give_output_up(error)
        sys.exit(1)


def _give_output_up(error: OSError) -> None:
    """Nobody reads any more (`| head`), which is no error to speak of; or the disk is full, which is."""
    if not isinstance(error, BrokenPipeError):
        sys.stderr.write(f"error: {error}\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at exit


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpage {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Plan, hold and share KV-cache page pools."""


app.command()(plan)
app.command()(simulate)
app.command()(top)


@app.command(context_settings=_PASS_ON)
def serve(context: typer.Context) -> None:
    """Start the HTTP service and its device workers (kvpage serve --help lists its options)."""
    _run_server("serve", context.args)


@app.command(context_settings=_PASS_ON)
def worker(context: typer.Context) -> None:
    """Start one device worker, or drain or replace the one that runs (kvpage worker --help lists the options)."""
    _run_server("worker", context.args)


@app.command()
def doctor(
    run_dir: pools.RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what of this machine kvpage can use, having tried it. Exit status 1 when something does not work."""
    from kvpage.cli.doctor import print_report
    from kvpage.doctor.report import examine

    findings = examine(run_dir)
    print_report(findings, as_json=as_json)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo(
    memory: Annotated[str, typer.Option(help="Size of each pool.")] = "256MiB",
    keep: Annotated[Path | None, typer.Option(help="Run directory to use and leave; else a temporary one.")] = None,
    device: Annotated[
        str | None, typer.Option(help="host or cuda:N; else a GPU where one can be used.", show_default=False)
    ] = None,
) -> None:
    """Plan two models, create their pools, and let unrelated processes write and check them."""
    from kvpage.cli.demo import run_demo
    from kvpage.cli.sizes import parse_bytes

    run_demo(parse_bytes(memory), keep, device)


def _run_server(command: str, arguments: list[str]) -> None:
    """Become the server: it is reached only as a program, so that this package never imports it."""
    if command == "serve" and find_spec("uvicorn") is None:
        raise DeviceUnavailable("kvpage serve needs more packages: pip install 'kvpage[server]'")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "kvpage_server", command, *arguments])
