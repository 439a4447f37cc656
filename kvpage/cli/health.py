"""`kvpage health`: is the service ready? For HEALTHCHECK, exec probes and scripts; standard library only."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpage.cli.probe import Found, get
from kvpage.cli.where import Where
from kvpage.errors import KvpageError, ProtocolError, SpecInvalid, error_from_code, printable, shorten
from kvpage.exit_status import DONE, FAILED, WRONG_INPUT, error_json

DEFAULT_TIMEOUT_S = 5.0
MAX_DETAIL_CHARS = 4000
_FLAGS = {"--live": "live", "--json": "as_json"}
_VALUES = {
    "--timeout": "timeout",
    "--url": "url",
    "--token-file": "token_file",
    "--ca-file": "ca_file",
    "--run-dir": "run_dir",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    where: Where
    live: bool
    as_json: bool
    timeout_s: float


def parse(arguments: Sequence[str]) -> Asked | None:
    """What was typed; None for what the full command line has to see: help, mistakes, other ways to write it."""
    typed: dict[str, str | None] = dict.fromkeys(_VALUES.values())
    flags = set()
    waiting = list(arguments)
    while waiting:
        word, is_joined, value = waiting.pop(0).partition("=")
        if word in _FLAGS and not is_joined:
            flags.add(_FLAGS[word])
        elif word in _VALUES and (is_joined or waiting):
            typed[_VALUES[word]] = value if is_joined else waiting.pop(0)
        else:
            return None
    return _asked(typed, flags)


def _asked(typed: Mapping[str, str | None], flags: set[str]) -> Asked | None:
    try:
        timeout_s = float(typed["timeout"] or DEFAULT_TIMEOUT_S)
        where = Where.of(typed)
    except (ValueError, SpecInvalid):
        return None
    if not 0 < timeout_s < float("inf"):
        return None
    return Asked(where=where, live="live" in flags, as_json="as_json" in flags, timeout_s=timeout_s)


def check(asked: Asked) -> int:
    """The exit status: 0, or 1 for everything that a probe shall count as a failure, also no answer."""
    try:
        found = get(asked.where, "/livez" if asked.live else "/readyz?verbose", asked.timeout_s)
        _check_status(found)
    except KvpageError as error:
        shown = error_json(error) if asked.as_json else f"error {error.code}: {printable(error.message)}"
        sys.stderr.write(shown + "\n")
        return WRONG_INPUT if isinstance(error, SpecInvalid) else FAILED
    sys.stdout.write(json.dumps(found.told) + "\n" if asked.as_json else _for_people(found))
    return DONE if found.status == 200 else FAILED


def _check_status(found: Found) -> None:
    """Raises what the server refuses with, and `ProtocolError` for an answer that is none."""
    code, detail = found.told.get("code"), found.told.get("detail")
    if isinstance(code, str) and isinstance(detail, str):
        raise error_from_code(code, detail[:MAX_DETAIL_CHARS])
    if not isinstance(found.told.get("status"), str):
        raise ProtocolError(f"the answer {found.status} says no status: {shorten(json.dumps(found.told))}")
    if not isinstance(found.told.get("checks", []), list):
        raise ProtocolError(f"the answer {found.status} has no list of checks: {shorten(json.dumps(found.told))}")


def _for_people(found: Found) -> str:
    lines = [printable(str(found.told["status"]))]
    for one in found.told.get("checks", []):
        if isinstance(one, dict) and not one.get("ok"):
            lines.append(f"  {printable(str(one.get('name')))}: {printable(str(one.get('detail') or 'not so'))}")
    return "\n".join(lines) + "\n"
