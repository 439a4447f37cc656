"""`kvpage health` with its help. What is typed without a mistake never comes here: see `kvpage.cli.main`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpage.cli import health as quick
from kvpage.cli.options import AsJson, CaFile, RunDir, TokenFile, Url, examples
from kvpage.cli.where import Where

EXAMPLES = examples("kvpage health", "kvpage health --live --timeout 2", "kvpage health --json")


def health(
    live: Annotated[bool, typer.Option("--live", help="Only whether the process answers.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="For the answer.")
    ] = quick.DEFAULT_TIMEOUT_S,
    as_json: AsJson = False,
    url: Url = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
    run_dir: RunDir = None,
) -> None:
    """Whether the service is ready. For health checks of containers, and quick: exit status 0, or 1.

    1 also when nobody answers, unlike other commands: that is what health checks understand.
    """
    where = Where.of({"url": url, "token_file": token_file, "ca_file": ca_file, "run_dir": run_dir})
    asked = quick.Asked(where=where, live=live, as_json=as_json, timeout_s=timeout_s)
    raise typer.Exit(quick.check(asked))
