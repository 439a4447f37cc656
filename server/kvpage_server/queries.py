"""Reads query strings: a parameter an operation does not know is refused, as an unknown field of a body is."""

from __future__ import annotations

import re

from fastapi import Request

from kvpage.errors import SpecInvalid, shorten
from kvpage.wire.leasing import MAX_CELLS
from kvpage_server.plan_cache import Form

MAX_WAIT_S = 30.0
DEFAULT_CELLS = 1024

_CELLS = re.compile(r"[1-9][0-9]{0,3}")
_GROUP = re.compile(r"0|[1-9][0-9]{0,3}")
_SECONDS = re.compile(r"[0-9]{1,64}(\.[0-9]{1,64})?([eE][+-]?[0-9]{1,3})?")  # a number as JSON has it


def known_query(request: Request, *names: str) -> dict[str, str]:
    """The parameters. Raises `SpecInvalid` for one that is not among `names` or is there more than once."""
    found: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names:
            known = ", ".join(names) or "none"
            raise SpecInvalid(f"there is no query parameter {shorten(repr(name))} here; there is: {known}")
        if name in found:
            raise SpecInvalid(f"the query parameter {name} is there more than once; send it once")
        found[name] = value
    return found


def query_wait_s(request: Request) -> float:
    """Of `?wait=N`, the only parameter."""
    return wait_s(known_query(request, "wait"))


def group_of(query: dict[str, str]) -> int:
    """Of `group`, which must be there. Raises `SpecInvalid`."""
    given = query.get("group", "")
    if not _GROUP.fullmatch(given):
        raise SpecInvalid(f"group is {shorten(repr(given))}; it must be the number of one of the plan's groups, from 0")
    return int(given)


def cells_of(query: dict[str, str]) -> int:
    """Of `cells`; `DEFAULT_CELLS` without one. Raises `SpecInvalid`."""
    given = query.get("cells", str(DEFAULT_CELLS))
    if not _CELLS.fullmatch(given) or int(given) > MAX_CELLS:
        raise SpecInvalid(f"cells is {shorten(repr(given))}; it must be a whole number from 1 to {MAX_CELLS}")
    return int(given)


def is_true(query: dict[str, str], name: str) -> bool:
    """Whether the parameter is there and `true`. Raises `SpecInvalid` for anything but `true` and `false`."""
    given = query.get(name, "false")
    if given not in ("true", "false"):
        raise SpecInvalid(f"{name} is {shorten(repr(given))}; it must be 'true' or 'false'")
    return given == "true"


def wait_s(query: dict[str, str]) -> float:
    """Seconds of `wait`; at most `MAX_WAIT_S`, 0 without one."""
    given = query.get("wait")
    if given is None:
        return 0.0
    if not _SECONDS.fullmatch(given):
        raise SpecInvalid(f"wait is {shorten(repr(given))}; it must be a number of seconds, 0 or more, such as 2.5")
    return min(float(given), MAX_WAIT_S)


def query_form(request: Request) -> Form:
    """`?detail=`, the only parameter."""
    detail = known_query(request, "detail").get("detail", "full")
    if detail == "full":
        return "full"
    if detail == "groups":
        return "groups"
    raise SpecInvalid(f"detail is {shorten(repr(detail))}; it must be 'full' or 'groups'")
