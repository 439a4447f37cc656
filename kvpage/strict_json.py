"""JSON as kvpage reads it: RFC 8259 with nothing left to interpretation.

The standard library's parser accepts `NaN`, keeps the last of two equal keys, turns `1e999` into infinity, passes
lone surrogates through and recurses as deep as its input. Two readers of one document could then see two requests.
Here each of these is a `JsonInvalid` that says where.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from kvpage.errors import FieldError, JsonInvalid, TooLarge, shorten

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32
MAX_INTEGER_DIGITS = 100  # the largest size a request may hold has 19; int() of a million digits takes seconds

# A string, with or without its closing quote: an unclosed one must match too, or each of its escaped quotes would be
# tried as a new start and the scan would become quadratic. The quantifiers are possessive for the same reason.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_STRING_OR_BRACKET = re.compile(_STRING + r"|[\[\]{}]", re.DOTALL)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def loads(data: bytes, *, max_bytes: int = MAX_BODY_BYTES, max_depth: int = MAX_DEPTH, constants: bool = False) -> Any:
    """The value `data` spells. Raises `TooLarge` over `max_bytes`, `JsonInvalid` for everything else.

    `max_depth`: how many arrays and objects may be open at once. `constants`: read `NaN`, `Infinity` and `-Infinity`,
    which are not JSON but stand in files that Python wrote.
    """
    if len(data) > max_bytes:
        raise TooLarge(
            f"the JSON is {len(data)} bytes long; at most {max_bytes} are read. Repeat layers with `count`.",
            details={"size_bytes": len(data), "limit_bytes": max_bytes},
        )
    text = _decode(data)
    _check_depth(text, max_depth)
    value = _parse(text, float if constants else _refuse_constant)
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(value)
    return value


def pointer(*tokens: str | int) -> str:
    """RFC 6901 pointer through `tokens`; a long key is shortened, for the pointer is shown to people."""
    return "".join("/" + shorten(str(token)).replace("~", "~0").replace("/", "~1") for token in tokens)


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonInvalid(
            f"the JSON is not UTF-8: byte {error.start} of {len(data)} does not decode", details={"byte": error.start}
        ) from None


def _check_depth(text: str, max_depth: int) -> None:
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = text[found.start()]
        if mark in "[{":
            depth += 1
            if depth > max_depth:
                raise JsonInvalid(
                    f"the JSON nests deeper than {max_depth} levels at character {found.start()}; "
                    f"no kvpage document needs that",
                    details={"limit": max_depth, "character": found.start()},
                )
        elif mark in "]}":
            depth -= 1


class _Repeating(dict[str, Any]):
    """An object in which `key` appears more than once."""

    key: str


def _parse(text: str, parse_constant: Callable[[str], float]) -> Any:
    repeats = False

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) == len(pairs):
            return built
        nonlocal repeats
        repeats = True
        return _mark_repeated(pairs)

    try:
        value = json.loads(
            text, object_pairs_hook=build, parse_int=_integer, parse_float=_float, parse_constant=parse_constant
        )
    except json.JSONDecodeError as error:
        raise JsonInvalid(
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            details={"line": error.lineno, "column": error.colno},
        ) from None
    if repeats:
        _refuse_repeated_key(value)
    return value


def _mark_repeated(pairs: list[tuple[str, Any]]) -> _Repeating:
    marked, seen = _Repeating(pairs), set()
    for key, _ in pairs:
        if key in seen:
            marked.key = key
            break
        seen.add(key)
    return marked


def _refuse_repeated_key(value: Any) -> NoReturn:
    for path, item in _walk(value):
        if isinstance(item, _Repeating):
            where = pointer(*path, item.key)
            raise JsonInvalid(
                f"the key {shorten(item.key)!r} appears twice in one object; keep one of them",
                errors=[FieldError(where, "appears twice")],
            )
    # A repeating object that another repeated key has hidden: its own parent repeats, so the loop has found that.
    raise AssertionError("a repeated key was seen but is nowhere in the value")


def _refuse_lone_surrogates(value: Any) -> None:
    for path, item in _walk(value):
        keys = item if isinstance(item, dict) else ()
        for text in (item, *keys):
            if isinstance(text, str) and _LONE_SURROGATE.search(text):
                raise JsonInvalid(
                    "a string holds half of a surrogate pair, which is no character and cannot be sent back",
                    errors=[FieldError(pointer(*path), "holds a lone surrogate")],
                )


def _walk(value: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value inside `value`, itself first, with its path; no recursion, document order within a container."""
    todo: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while todo:
        path, item = todo.pop()
        yield path, item
        if isinstance(item, dict):
            todo += [((*path, key), inner) for key, inner in reversed(item.items())]
        elif isinstance(item, list):
            todo += [((*path, index), item[index]) for index in range(len(item) - 1, -1, -1)]


def _integer(literal: str) -> int:
    num_digits = len(literal.removeprefix("-"))
    if num_digits > MAX_INTEGER_DIGITS:
        raise JsonInvalid(
            f"an integer of {num_digits} digits; no size has more than {MAX_INTEGER_DIGITS}",
            details={"digits": num_digits, "limit": MAX_INTEGER_DIGITS},
        )
    return int(literal)


def _float(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise JsonInvalid(f"the number {shorten(literal)} is too large for a double")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise JsonInvalid(f"{name} is not JSON; leave the field out or give a number")
