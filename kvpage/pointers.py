"""From pydantic's error positions to JSON pointers into the request as it was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from kvpage.errors import FieldError, SpecInvalid, shorten


def located(error: ValidationError, request: object) -> SpecInvalid:
    """`error` as one `SpecInvalid`, or as the child of it that a validator raised, with a pointer for every fault."""
    faults: list[FieldError] = []
    kinds: list[type[SpecInvalid]] = []
    for fault in error.errors(include_url=False):
        cause = fault.get("ctx", {}).get("error")
        kinds.append(type(cause) if isinstance(cause, SpecInvalid) else SpecInvalid)
        if isinstance(cause, SpecInvalid) and cause.errors:
            faults.extend(cause.errors)
            continue
        pointer = _pointer(fault["loc"], request, is_missing=fault["type"] == "missing")
        detail = (
            cause.message if isinstance(cause, SpecInvalid) else _detail(fault["type"], fault["msg"], fault["input"])
        )
        faults.append(FieldError(pointer, detail))
    kind = kinds[0] if len(set(kinds)) == 1 else SpecInvalid
    first = faults[0]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return kind(f"{first.pointer or 'the request'}: {first.detail}{more}", errors=faults)


def _detail(kind: str, message: str, value: object) -> str:
    if kind == "missing" or isinstance(value, Mapping | list | tuple):
        return message
    return f"{message}, got {shorten(repr(value)) if not isinstance(value, int) else _number(value)}"


def _number(value: int) -> str:
    # A number of thousands of digits must not be turned into text.
    return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"


def _pointer(loc: Sequence[int | str], request: object, *, is_missing: bool) -> str:
    """RFC 6901. pydantic puts union tags into `loc`; what names nothing in the request is left out."""
    parts: list[str] = []
    here: object = request
    for index, step in enumerate(loc):
        found, inside = _step_into(here, step)
        if found:
            here = inside
        elif not (is_missing and index == len(loc) - 1):
            continue
        parts.append(shorten(str(step)).replace("~", "~0").replace("/", "~1"))
    return "".join("/" + part for part in parts)


def _step_into(here: object, step: int | str) -> tuple[bool, object]:
    if isinstance(here, Mapping):
        return step in here, here.get(step)
    if isinstance(here, list | tuple) and isinstance(step, int) and step < len(here):
        return True, here[step]
    return False, None
