"""`kvpage config`: the settings that hold, and where each came from. Starts nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpage.errors import KvpageError, SpecInvalid
from kvpage.exit_status import error_json, status_of
from kvpage_server.configured import run_directory_of, serve_parser, settings_of
from kvpage_server.setting_fields import Fields, Program, setting_of
from kvpage_server.setting_flags import FlagParser
from kvpage_server.setting_sources import DEFAULT, Resolved, resolve
from kvpage_server.shown_settings import masked
from kvpage_server.standard_error import write_line
from kvpage_server.start_errors import report
from kvpage_server.start_worker import worker_command, worker_parser

NOT_SET = "-"


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Returns 2 when the settings are wrong."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    options = vars(known)
    as_json, only_check = options.pop("json", False), options.pop("check", False)
    program = options.pop("program", None)
    flags = _flags(parser, program, rest) | options
    try:
        resolved = resolve(flags, environ)
        if not only_check:
            _print(resolved, program, as_json=as_json)
        check(resolved, program)
    except BrokenPipeError:  # `| head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KvpageError as error:
        sys.stdout.flush()
        write_line(error_json(error) if as_json else report("config", error))
        return status_of(error)
    return 0


def check(resolved: Resolved, program: Program | None = None) -> None:
    """Raises `SpecInvalid` for settings that are wrong together, each of which is right; None: for either program."""
    faults = []
    for name, attempt in (("serve", settings_of), ("worker", _worker)):
        if program in (None, name):
            try:
                attempt(resolved)
            except KvpageError as error:
                faults.append(error.message)
    if faults:
        raise SpecInvalid("\n".join(dict.fromkeys(faults)))


def _worker(resolved: Resolved) -> list[str]:
    return worker_command(resolved.with_device("host"))


def _print(resolved: Resolved, program: Program | None, *, as_json: bool) -> None:
    rows = list(_rows(resolved, program))
    if as_json:
        settings = {
            name: {"value": value, "source": origin.source, "from": str(origin)} for name, value, origin in rows
        }
        told = {
            "file": None if resolved.file is None else str(resolved.file),
            "settings": settings,
            "ignored_variables": resolved.ignored_variables,
        }
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write("".join(_lines(resolved, rows)))
    sys.stdout.flush()


def _lines(resolved: Resolved, rows: Sequence[tuple[str, Any, Any]]) -> Iterator[str]:
    texts = [("setting", "value", "from")]
    texts += [(name, NOT_SET if value is None else _text(value), str(origin)) for name, value, origin in rows]
    widths = [max(len(text[column]) for text in texts) for column in (0, 1)]
    for name, value, origin in texts:
        yield f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}\n"
    yield f"\nsettings file: {'none' if resolved.file is None else resolved.file}\n"
    if resolved.ignored_variables:
        yield f"ignored, as they are no settings: {', '.join(resolved.ignored_variables)}\n"


def _rows(resolved: Resolved, program: Program | None) -> Iterator[tuple[str, Any, Any]]:
    """Name, value as JSON knows it, origin. Without what must not be shown."""
    for name in Fields.model_fields:
        if program in (None, *setting_of(name).programs):
            yield name, _value(resolved, name), resolved.origins.get(name, DEFAULT)


def _value(resolved: Resolved, name: str) -> Any:
    value = getattr(resolved.fields, name)
    if name == "run_dir" and value is None:
        try:
            return str(run_directory_of(resolved).path)
        except KvpageError:  # the check says why
            return None
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float)) else masked(str(value))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


def _flags(parser: FlagParser, program: Program | None, rest: Sequence[str]) -> dict[str, Any]:
    if program not in (None, "serve", "worker") or (program is None and rest):
        parser.refuse("options of a program stand behind its name: kvpage config serve --port 8080")
    if program is None:
        return {}
    flags = (serve_parser() if program == "serve" else worker_parser()).parse(rest)
    for name in ("ready_fd", "replace"):  # of one start, and no setting
        flags.pop(name, None)
    return flags


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="kvpage config",
        description="Print every setting that holds, and where it came from: a flag, a variable, the file, a default.",
        epilog="Behind serve or worker stand the options of that program: kvpage config serve --port 8080."
        " Exit status 2 when the settings are wrong. docs/settings.md explains them.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("program", nargs="?", default=None, metavar="serve|worker", help="only its settings")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="print nothing but what is wrong")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (KVPAGE_CONFIG)")
    return parser
