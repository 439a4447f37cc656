"""From pydantic's error positions to JSON pointers into the request as it was sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvpage.errors import FieldError, SpecInvalid, nearest, shorten

_QUOTED = re.compile(r"'(\w+)'")
MAX_FAULTS = 100  # named in one error; how many there are is said in any case


def located(error: ValidationError, request: object) -> SpecInvalid:
    """`error` as one `SpecInvalid`, or as the child of it that a validator raised, with a pointer for every fault."""
    faults: list[FieldError] = []
    kinds: list[type[SpecInvalid]] = []
    for fault in error.errors(include_url=False)[:MAX_FAULTS]:
        cause = fault.get("ctx", {}).get("error")
        kinds.append(type(cause) if isinstance(cause, SpecInvalid) else SpecInvalid)
        if isinstance(cause, SpecInvalid) and cause.errors:
            faults.extend(cause.errors)
            continue
        pointer = _pointer(_place(fault["type"], fault["loc"]), request, is_missing=fault["type"] in _ABSENT)
        detail = cause.message if isinstance(cause, SpecInvalid) else _text(fault)
        faults.append(FieldError(pointer, detail))
    kind = kinds[0] if len(set(kinds)) == 1 else SpecInvalid
    first = faults[0]
    num_others = max(len(faults), error.error_count()) - 1
    more = f" (and {num_others} more)" if num_others else ""
    return kind(f"{first.pointer or 'the request'}: {first.detail}{more}", errors=faults)


_ABSENT = ("missing", "union_tag_not_found")
_OUR_WORDS = {
    "missing": "this field is required",
    "extra_forbidden": "this field is not known here; leave it out, or check its spelling",
    "tuple_type": "this must be an array",
    "model_type": "this must be an object",
    "model_attributes_type": "this must be an object",
    "int_type": "this must be an integer",
    "string_type": "this must be a string",
    "bool_type": "this must be true or false",
    "union_tag_not_found": "this field is required",
}


def _place(kind: str, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Faults of the field that tells a union's members apart are reported at the union; they belong to the field."""
    return (*loc, "kind") if kind in ("union_tag_not_found", "union_tag_invalid") else loc


def _text(fault: ErrorDetails) -> str:
    if fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        tag, known = str(context.get("tag")), str(context.get("expected_tags"))
        return f"kind {shorten(repr(tag))} is not known; use one of {known}{nearest(tag, _QUOTED.findall(known))}"
    return _detail(fault["type"], fault["msg"], fault["input"])


def _detail(kind: str, message: str, value: object) -> str:
    """pydantic's message, in words of JSON where it speaks of Python's types, with the value where that is short."""
    text = _OUR_WORDS.get(kind, message)
    if kind in (*_ABSENT, "extra_forbidden") or isinstance(value, Mapping | list | tuple):
        return text
    return f"{text}, not {_as_json(value)}"


def _as_json(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"  # too long to be written out
    return shorten(value if isinstance(value, int | float) else repr(value))


def _pointer(loc: Sequence[int | str], request: object, *, is_missing: bool) -> str:
    """RFC 6901. pydantic puts union tags into `loc`; what names nothing in the request is left out."""
    parts: list[str] = []
    here: object = request
    for index, step in enumerate(loc):
        if index > 0 and isinstance(loc[index - 1], int) and isinstance(here, Mapping) and here.get("kind") == step:
            continue  # the layer's union tag, though "sliding_window" is also a field of such a layer
        found, inside = _step_into(here, step)
        if found:
            here = inside
        elif not (is_missing and index == len(loc) - 1):
            continue
        parts.append(shorten(str(step)).replace("~", "~0").replace("/", "~1"))
    return "".join("/" + part for part in parts)


def _step_into(here: object, step: int | str) -> tuple[bool, object]:
    if isinstance(here, BaseModel):
        here = vars(here)
    if isinstance(here, Mapping):
        return step in here, here.get(step)
    if isinstance(here, Sequence) and not isinstance(here, str) and isinstance(step, int) and step < len(here):
        return True, here[step]
    return False, None
