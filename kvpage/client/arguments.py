"""Checks of what a program passes to the client library, so that a mistake is named here and not by an encoder."""

from __future__ import annotations

import os

from kvpage.errors import SpecInvalid, shorten

MAX_SECONDS = 1e7  # about four months; the system's own clocks and timers take no more than some 1e9


def checked_text(field: str, value: object, *, max_bytes: int | None = None) -> str:
    """`value`, refused unless it is a str that UTF-8 can spell, not empty, of at most `max_bytes`."""
    if not isinstance(value, str):
        raise SpecInvalid(f"{field} is text, not {type(value).__name__} {shorten(value)}", details={"field": field})
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise SpecInvalid(
            f"{field} {shorten(repr(value))} has half of a surrogate pair at character {error.start}, which no UTF-8"
            " can spell; decode it with the encoding it was written in",
            details={"field": field},
        ) from None
    if max_bytes is not None and not 0 < num_bytes <= max_bytes:
        raise SpecInvalid(
            f"{field} {shorten(repr(value))} has {num_bytes} bytes; 1 to {max_bytes} are allowed",
            details={"field": field, "num_bytes": num_bytes, "limit_bytes": max_bytes},
        )
    return value


def checked_optional(field: str, value: object, *, max_bytes: int | None = None) -> str | None:
    return None if value is None else checked_text(field, value, max_bytes=max_bytes)


def checked_seconds(field: str, value: object) -> float:
    """`value`, refused unless it is a number from 0 to `MAX_SECONDS`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecInvalid(
            f"{field} is a number of seconds, not {type(value).__name__} {shorten(value)}", details={"field": field}
        )
    if not 0 <= value <= MAX_SECONDS:  # as for NaN
        raise SpecInvalid(
            f"{field} is {shorten(value)}; it must be from 0 to {MAX_SECONDS:g} seconds", details={"field": field}
        )
    return float(value)


def checked_path(field: str, value: object) -> str | None:
    """`value` as text, refused unless it is None or names a file."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise SpecInvalid(f"{field} is a path, not {type(value).__name__} {shorten(value)}", details={"field": field})
    try:
        path = os.fsdecode(value)
        os.fsencode(path)
    except (UnicodeError, TypeError) as error:
        raise SpecInvalid(f"{field} {shorten(repr(value))} is no path: {shorten(str(error))}") from None
    if "\0" in path:
        raise SpecInvalid(f"{field} {shorten(repr(path))} has a zero byte, which no path has", details={"field": field})
    return path
