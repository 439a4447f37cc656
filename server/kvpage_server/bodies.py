"""Reads what a request carries besides its path: the body and its type, `Prefer: wait`, `Accept-Encoding`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from fastapi import Request

from kvpage import strict_json
from kvpage.errors import FieldError, SpecInvalid, UnsupportedMediaType, shorten
from kvpage_server.queries import MAX_WAIT_S
from kvpage_server.services import services_of

_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")
_REFUSED = re.compile(r"q\s*=\s*0(\.0*)?")
_FAULT_PATH = re.compile(r" - at (?:`key` in )?`\$([^`]*)`$")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_BRIEF_BYTES = 16 << 10  # parsing more takes so long that other requests would notice
_Value = TypeVar("_Value", bound=msgspec.Struct)
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


async def read_body(request: Request, kind: type[_Value]) -> _Value:
    """The body as a `kind`. Raises `SpecInvalid` with a pointer to the first fault, and as `json_body`."""
    body, max_bytes = await json_body(request), services_of(request).settings.intake.max_body_bytes
    if len(body) <= _BRIEF_BYTES:
        return parsed(body, kind, max_bytes)
    return await asyncio.to_thread(parsed, body, kind, max_bytes)


def parsed(body: bytes, kind: type[_Value], max_bytes: int) -> _Value:
    value = strict_json.loads(body, max_bytes=max_bytes)
    if not isinstance(value, Mapping):
        raise SpecInvalid(f"a {kind.__name__} is a JSON object, not {type(value).__name__}")
    try:
        return msgspec.convert(value, kind, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise _located(str(error), kind.__name__) from None


def _located(message: str, what: str) -> SpecInvalid:
    found = _FAULT_PATH.search(message)
    text = shorten(message[: found.start()] if found else message)
    pointer = _pointer(found[1]) if found else ""
    return SpecInvalid(f"{pointer or what}: {text}", errors=[FieldError(pointer, text)])


def _pointer(path: str) -> str:
    """To the place, or to the mapping it is in: of keys of mappings nobody tells."""
    return strict_json.pointer(*(name or int(number) for name, number in _STEP.findall(path.partition("[...]")[0])))


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
