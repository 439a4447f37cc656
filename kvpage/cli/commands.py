"""The commands and their options. Each does one thing and leaves the work to the library."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvpage import __version__
from kvpage.cli import completion, events, fleet, health_options, planning, pools, simulate, top
from kvpage.cli.failing import tell, tell_usage, wants_json
from kvpage.cli.options import AsJson, RunDir, examples
from kvpage.errors import KvpageError, NotSupported, how_to_install
from kvpage.exit_status import FAILED, status_of
from kvpage.program_end import end_of

app = typer.Typer(
    name="kvpage",
    help="Plan, hold and share KV-cache page pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "kvpage plan model.yaml",
        "kvpage serve --device host --memory 4GiB",
        "kvpage pools create model.yaml --name mimo",
        "kvpage events --kind pool",
    ),
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run() -> None:
    """Run the command line of this process, and end it. Errors are told, not traced."""
    as_json = wants_json(sys.argv[1:])
    sys.exit(end_of(lambda: _typed(as_json=as_json), as_json=as_json))


def _typed(*, as_json: bool) -> int | None:
    try:
        status: int | None = app(standalone_mode=False)
    except typer.TyperException as error:
        tell_usage(error, as_json=as_json)
        return error.exit_code
    except KvpageError as error:
        tell(error, as_json=as_json)
        return status_of(error)
    return status


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpage {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Plan, hold and share KV-cache page pools."""


app.command(epilog=planning.EXAMPLES)(planning.plan)
app.command(epilog=simulate.EXAMPLES)(simulate.simulate)
app.add_typer(pools.app, name="pools")
app.add_typer(fleet.app, name="fleet")
app.command(epilog=top.EXAMPLES)(top.top)
app.command(epilog=events.EXAMPLES)(events.events)
app.command(epilog=health_options.EXAMPLES)(health_options.health)


@app.command(
    context_settings=_PASS_ON,
    epilog=examples("kvpage serve --device host --memory 4GiB", "kvpage serve --external-workers --port 8080"),
)
def serve(context: typer.Context) -> None:
    """Start the HTTP service and its device workers (kvpage serve --help lists its options)."""
    _run_server("serve", context.args)


@app.command(
    context_settings=_PASS_ON,
    epilog=examples(
        "kvpage worker --device cuda:0 --memory 0.9",
        "kvpage worker replace --device host --json",
        "kvpage worker drain --device host --wait 60",
    ),
)
def worker(context: typer.Context) -> None:
    """Start one device worker, or drain or replace the one that runs (kvpage worker --help lists the options)."""
    _run_server("start-worker", context.args)


@app.command(
    "config",
    context_settings=_PASS_ON,
    epilog=examples("kvpage config", "kvpage config serve --port 8080 --json", "kvpage config --check"),
)
def configuration(context: typer.Context) -> None:
    """Print every setting of serve and worker, and where it came from (kvpage config --help lists the options)."""
    _run_server("config", context.args)


@app.command(epilog=examples("kvpage doctor", "kvpage doctor --json"))
def doctor(as_json: AsJson = False, run_dir: RunDir = None) -> None:
    """Say what of this machine kvpage can use, having tried it. Exit status 1 when something does not work."""
    from kvpage.cli.doctor import print_report
    from kvpage.doctor.report import examine

    findings = examine(run_dir)
    print_report(findings, as_json=as_json)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(FAILED)


@app.command(epilog=examples("kvpage demo", "kvpage demo --memory 64MiB --device host --json"))
def demo(
    memory: Annotated[str, typer.Option(metavar="BYTES", help="Size of each pool.")] = "256MiB",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="host or cuda:N; else a GPU where one can be used.", show_default=False,
            autocompletion=completion.among(lambda: ["host", "cuda:0"]),
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run directory to use and leave; else a temporary one.")
    ] = None,
    page: Annotated[
        bool | None,
        typer.Option("--page/--no-page", help="Serve the web page then, until Ctrl-C. Left out: in a terminal."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Plan two models, create their pools, and let unrelated processes write and check them."""
    from kvpage.cli.demo import run_demo
    from kvpage.cli.sizes import parse_bytes

    with_page = (sys.stdout.isatty() and not as_json) if page is None else page
    run_demo(parse_bytes(memory), keep, device, as_json=as_json, with_page=with_page)


@app.command(epilog=examples("kvpage version", "kvpage version --json"))
def version(as_json: AsJson = False) -> None:
    """Print which version this is."""
    typer.echo(json.dumps({"version": __version__}) if as_json else f"kvpage {__version__}")


def _run_server(command: str, arguments: list[str]) -> None:
    """Become the server: it is reached only as a program, so that this package never imports it."""
    if find_spec("pydantic_settings") is None or (command == "serve" and find_spec("uvicorn") is None):
        raise NotSupported(f"kvpage serve, worker and config need more packages: {how_to_install('server')}")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "kvpage_server", command, *arguments])
