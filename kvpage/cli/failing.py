"""How errors are told: a line for people, or one JSON object on standard error where `--json` was typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from typer import TyperException

from kvpage.cli.output import print_error
from kvpage.errors import KvpageError, printable
from kvpage.exit_status import error_json

USAGE = "usage"
"""The code of a mistake on the command line, beside those of `kvpage.errors`."""


def wants_json(arguments: Sequence[str]) -> bool:
    """As far as can be said of a command line that may be wrong."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def tell(error: KvpageError, *, as_json: bool) -> None:
    if as_json:
        sys.stderr.write(error_json(error) + "\n")
    else:
        print_error(error)


def tell_usage(error: TyperException, *, as_json: bool) -> None:
    """Nothing where the help was printed instead."""
    context = getattr(error, "ctx", None)
    command = "kvpage" if context is None else context.command_path
    message = " ".join(error.format_message().split())
    if as_json:
        told = {"code": USAGE, "message": message, "details": {"command": command}, "retryable": False}
        sys.stderr.write(json.dumps(told) + "\n")
    elif type(error).__name__ != "NoArgsIsHelpError":
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        end = " See" if message.endswith("?") else "; see"
        console.print(
            f"[bold red]error[/] {USAGE}: {escape(printable(message.rstrip('.')))}{end} `{escape(command)} --help`"
        )
