"""RFC 9457 problems as a client reads them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpage.errors import FieldError, KvpageError, ProtocolError, error_from_code, shorten


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
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = shorten(body[:1000].decode("utf-8", "replace"))
        return ProtocolError(f"the server answered {status} without saying why in kvpage's terms: {text}")
    faults = [FieldError(fault.pointer, fault.detail) for fault in problem.errors]
    return error_from_code(problem.code, problem.detail, details=problem.details, errors=faults)
