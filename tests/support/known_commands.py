"""Commands, their options and make targets as the programs themselves have them, and those that a page names."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import typer

from kvpage.cli.commands import app
from kvpage_server import config_command, serve, start_worker, worker_commands
from support.checkout import ROOT
from support.markdown import Page

OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
SHELLS = ("sh", "text")
END_OF_COMMAND = re.compile(r"[|;&()<>#]")


@cache
def options() -> dict[tuple[str, ...], set[str]]:
    """By command: `("pools", "create")`; `()` is `kvpage` itself."""
    root = typer.main.get_command(app)
    known = dict(_walk(root, ()))
    known[("serve",)] = _helped(serve.main, "--help")
    known[("worker",)] = _helped(start_worker.main, "--help")
    known[("worker", "drain")] = _helped(worker_commands.main, "drain", "--help")
    known[("worker", "replace")] = known[("worker",)] | _helped(worker_commands.main, "replace", "--help")
    known[("config",)] = _helped(config_command.main, "--help")
    known |= {("config", program): known[("config",)] | known[(program,)] for program in ("serve", "worker")}
    return known


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    yield path, own | {"--help", "-h"}
    for name, child in getattr(command, "commands", {}).items():
        yield from _walk(child, (*path, name))


def _helped(main: Callable[[list[str]], int], *arguments: str) -> set[str]:
    """What a program that argparse reads says of itself."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(list(arguments))
    found = set(OPTION.findall(shown.getvalue()))
    assert "--help" in found, arguments
    return found


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def named(page: Page, program: str) -> Iterator[list[str]]:
    """Words after `program` in code of the page that begins with it, up to the end of that command."""
    lines = [
        line
        for fence in page.fences
        if fence.info.split()[:1] in [[shell] for shell in SHELLS]
        for line in fence.text.replace("\\\n", " ").splitlines()
    ]
    for code in [*page.code_spans, *lines]:
        words = END_OF_COMMAND.split(code.strip().removeprefix("$ "), maxsplit=1)[0].split()
        if words[:1] == [program] and len(words) > 1 and not words[1].endswith(":"):  # "kvpage serve: …" is an error
            yield words[1:]


def fault(words: list[str]) -> str | None:
    """What is wrong with a command of `kvpage`, or None. A word in capitals stands for any."""
    path: tuple[str, ...] = ()
    for word in words:
        if (*path, word) not in options():
            break
        path = (*path, word)
    rest = words[len(path) :]
    if not path and not rest[0].startswith("-") and not rest[0].isupper():
        return f"there is no command {rest[0]}"
    unknown = [word for word in rest if OPTION.match(word) and word.partition("=")[0] not in options()[path]]
    return f"{' '.join(path)} has no {unknown[0]}" if unknown else None
