"""Reads what a request carries besides its path: the body's type and bytes, `Prefer: wait`, `Accept-Encoding`."""

from __future__ import annotations

import re

from fastapi import Request

from kvpage.errors import UnsupportedMediaType, shorten
from kvpage_server.queries import MAX_WAIT_S

_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")
_REFUSED = re.compile(r"q\s*=\s*0(\.0*)?")
_CHARSET = re.compile(r"charset\s*=\s*\"?([^\s\";]*)\"?", re.IGNORECASE)


async def json_body(request: Request) -> bytes:
    """The body's bytes. Raises `UnsupportedMediaType` before reading unless they are declared as plain JSON."""
    declared = ", ".join(request.headers.getlist("content-type"))
    media_type, _, parameters = declared.partition(";")
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaType(
            f"Content-Type is {shorten(declared) or 'missing'}; send Content-Type: application/json"
        )
    for charset in _CHARSET.findall(parameters):
        if charset.lower() not in ("utf-8", "utf8"):
            raise UnsupportedMediaType(f"charset {shorten(charset)} is not read; JSON is UTF-8")
    encoding = ", ".join(request.headers.getlist("content-encoding"))
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(f"Content-Encoding {shorten(encoding)} is not read; send the body uncompressed")
    return await request.body()


def preferred_wait_s(request: Request) -> float:
    """Seconds of `Prefer: wait=N`, at most `MAX_WAIT_S`; 0 without one. A malformed one is ignored (RFC 7240)."""
    for header in request.headers.getlist("prefer"):
        for preference in header.split(","):
            found = _WAIT.fullmatch(preference.strip().lower())
            if found:
                return min(float(found[1]), MAX_WAIT_S)
    return 0.0


def accepts_gzip(accept_encoding: str) -> bool:
    """What the value of `Accept-Encoding` says, "" when there is none."""
    if "gzip" not in accept_encoding.lower() and "*" not in accept_encoding:
        return False
    accepted: dict[str, bool] = {}
    for coding in accept_encoding.split(","):
        name, _, parameters = coding.partition(";")
        accepted[name.strip().lower()] = not _REFUSED.fullmatch(parameters.strip())
    return accepted.get("gzip", accepted.get("*", False))
