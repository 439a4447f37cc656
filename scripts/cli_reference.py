"""Writes the tables of docs/cli.md from the commands themselves: python scripts/cli_reference.py"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rich.text import Text
from typer.core import TyperGroup
from typer.main import get_command

from kvpage.cli.commands import app
from kvpage.exit_status import MEANINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
PROGRAMS = {
    "serve": ("serve",),
    "worker": ("start-worker",),
    "worker drain": ("start-worker", "drain"),
    "worker replace": ("start-worker", "replace"),
    "config": ("config",),
}
"""Commands that are programs of the server, and what `python -m kvpage_server` calls them."""
_OPTION = re.compile(r"^  (?P<names>-\S.*?)(?:   *(?P<help>\S.*))?$")
_JOINED = re.compile(r"^(  -.*)\n {20,}", re.MULTILINE)
"""A help that argparse puts below the name of its option, because that is long."""
_WIDE = "4000"  # so that argparse breaks no line: how it does differs from Python to Python

STATUSES, COMMANDS = "<!-- statuses: written by the script -->", "<!-- commands: written by the script -->"


def write(page: str) -> str:
    """`page` with its two written parts written anew; what stands before each is a person's."""
    prose, _, rest = page.partition(STATUSES)
    more = rest[rest.index("\n## ") : rest.index(COMMANDS)]
    statuses = [f"| {status} | {_cell(meaning)} |" for status, meaning in MEANINGS.items()]
    root = get_command(app)
    written = [_options_of(root), *(_section(path, command) for path, command in commands(root))]
    table = "\n".join([STATUSES, "", "| status | meaning |", "| --- | --- |", *statuses])
    return f"{prose}{table}\n{more}{COMMANDS}\n\n" + "\n".join(written).rstrip() + "\n"


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command below `command`, with what is typed after `kvpage`; groups before what is in them."""
    for name, child in command.commands.items() if isinstance(command, TyperGroup) else ():
        yield " ".join((*path, name)), child
        yield from commands(child, (*path, name))


def _options_of(root: Any) -> str:
    rows = [f"| `{', '.join(one.opts)}` | {_cell(one.help)} |" for one in root.params if one.name != "help"]
    return "\n".join(["## Of `kvpage` itself", "", "| option | |", "| --- | --- |", *rows, ""])


def _section(path: str, command: Any) -> str:
    lines = [f"## `kvpage {path}`", "", *_prose(command.help)]
    if path in PROGRAMS:
        for name in [name for name in PROGRAMS if name == path or name.startswith(f"{path} ")]:
            lines += _program(name, is_first=name == path)
    elif not isinstance(command, TyperGroup):
        lines += [f"    kvpage {path} {_usage(command)}".rstrip(), "", *_table(command)]
    return "\n".join([*lines, *_examples(command)])


def _prose(text: str) -> list[str]:
    return [line for part in text.split("\n\n") for line in (" ".join(part.split()), "")]


def _usage(command: Any) -> str:
    words = [one.metavar if one.required else f"[{one.metavar}]" for one in _arguments(command)]
    return " ".join([*words, "[OPTIONS]"])


def _arguments(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "argument"]


def _table(command: Any) -> list[str]:
    rows = []
    for one in command.params:
        if one.name == "help":
            continue
        is_argument = one.param_type_name == "argument"
        names = one.metavar if is_argument else ", ".join([*one.opts, *one.secondary_opts])
        metavar = "" if is_argument or one.is_flag else f" {one.metavar}"
        rows.append(f"| `{names}{metavar}` | {_cell(one.help)}{_default(one)} |")
    return ["| | |", "| --- | --- |", *rows, ""] if rows else []


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", True)
    if isinstance(shown, str):
        return f" Default: {shown}."
    if parameter.required:
        return " Required." if parameter.param_type_name == "option" else ""
    is_none = parameter.default is None or parameter.default is False
    return "" if is_none or not shown else f" Default: `{parameter.default}`."


def _program(name: str, *, is_first: bool) -> list[str]:
    """Read from what its `--help` prints."""
    told = _helped(PROGRAMS[name])
    usage = told.partition("\n\n")[0].removeprefix("usage: ")
    described, rows = [], []
    for line in _JOINED.sub(r"\1  ", told).splitlines():
        option = _OPTION.match(line)
        if option and "--help" not in option["names"]:
            rows.append(f"| `{_bars(option['names'].strip())}` | {_cell(option['help'])} |")
        elif option is None and line and not line.startswith((" ", "usage:", "options:", "positional")):
            described.append(line)
    title = [] if is_first else [f"### `kvpage {name}`", ""]
    command = f"    {usage.split(' [')[0]} [OPTIONS]"
    return [*title, *(line for text in described for line in (_plain(text), "")), command, "",
            "| | |", "| --- | --- |", *rows, ""]  # fmt: skip


@cache
def _helped(arguments: tuple[str, ...]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvpage_server", *arguments, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": _WIDE, "NO_COLOR": "1", "PYTHON_COLORS": "0"},
    )
    return done.stdout


def _examples(command: Any) -> list[str]:
    lines = (command.epilog or "").splitlines()[1:]
    return ["```text", *lines, "```", ""] if lines else []


def _cell(text: str | None) -> str:
    """As a cell of a table."""
    return _plain(" ".join((text or "").split()))


def _plain(text: str) -> str:
    return _bars(Text.from_markup(text).plain).replace("<", "&lt;")


def _bars(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(write(PAGE.read_text()))
