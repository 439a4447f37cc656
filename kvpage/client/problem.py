"""RFC 9457 problems as a client reads them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpage.errors import FieldError, KvpageError, ProtocolError, error_from_code, shorten

MAX_DETAIL_CHARS = 4000  # no message of kvpage's is longer


class _Fault(msgspec.Struct, frozen=True, kw_only=True):
    pointer: str
    detail: str


class _Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The members a `KvpageError` is made of; others are ignored."""

    code: str
    detail: str
    errors: list[_Fault] = []
    details: dict[str, Any] = {}


def error_of(status: int, body: bytes) -> KvpageError:
    """The error an answer of `status` reports; `ProtocolError` when its body is no problem of kvpage's."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (ValueError, RecursionError):  # msgspec's own errors are ValueErrors, and so is an int too long
        return ProtocolError(
            f"the server answered {status} without saying why in kvpage's terms; the answer begins with"
            f" {beginning(body)}"
        )
    faults = [FieldError(fault.pointer, fault.detail) for fault in problem.errors]
    detail = problem.detail[:MAX_DETAIL_CHARS]
    return error_from_code(problem.code, detail, details=problem.details, errors=faults)


def beginning(body: bytes) -> str:
    """Of an answer, to show to people."""
    return repr(shorten(body[:80].decode("utf-8", "replace"))) if body else "nothing"
