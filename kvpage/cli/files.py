"""Reading a request from a file: JSON or YAML, `-` for standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from kvpage.cli import plain_yaml
from kvpage.errors import JsonInvalid, SpecInvalid, TooLarge, shorten
from kvpage.strict_json import loads

MAX_FILE_BYTES = 4 << 20


DEFAULT_STRATEGY = "auto"


def read_request(name: str) -> Any:
    """The request in file `name`: JSON by its first character or `.json`, else YAML. A person may leave the strategy
    out.

    Raises `SpecInvalid`, `TooLarge`, `JsonInvalid` (for YAML too) naming the file.
    """
    data = _read(name)
    try:
        if name.endswith(".json") or data.lstrip()[:1] == b"{":
            request = loads(data, max_bytes=MAX_FILE_BYTES)
        else:
            request = plain_yaml.load(data)
    except JsonInvalid as error:
        raise JsonInvalid(f"{_shown(name)}: {error.message}", details=error.details, errors=error.errors) from None
    return {"strategy": DEFAULT_STRATEGY, **request} if isinstance(request, dict) else request


def write_text(name: str, text: str) -> None:
    """Write `text` to file `name`, or to standard output for `-`. Raises `SpecInvalid` naming a file that can be none,
    OSError for one that does not take the text.
    """
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115  # what fails behind this is no wrong name
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecInvalid(f"cannot write {_shown(name)}: {reason}; check the path") from error
    with file:
        file.write(text)


def _read(name: str) -> bytes:
    try:
        if name == "-":
            if sys.stdin is None:  # Python's way to say that descriptor 0 is closed
                raise SpecInvalid("cannot read standard input: it is closed; name a file, or pipe the request in")
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecInvalid(f"cannot read {_shown(name)}: {reason}; check the path") from error
    if len(data) > MAX_FILE_BYTES:
        raise TooLarge(f"{_shown(name)} has more than {MAX_FILE_BYTES} bytes; write repeated layers once with `count`")
    return data


def _shown(name: str) -> str:
    return "standard input" if name == "-" else f"'{shorten(name)}'"
