"""What a plan request is made of, looked at before it is validated.

pydantic takes any iterable for an array, one without end too, and writes what it refuses into its errors. So a
request holds mappings, sequences, text, numbers, true, false and null, as JSON does, and no more of them than a
request can have; its own models may stand in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from kvpage.errors import FieldError, SpecInvalid, shorten
from kvpage.models.options import MAX_RANKS
from kvpage.strict_json import pointer

MAX_LAYERS = 4096
MAX_KEYS = 64  # of an object; more are no fields of ours
MAX_ITEMS = 64  # of an array other than layers and ranks
MAX_DEPTH = 8

Path = tuple[str | int, ...]
_PLAIN = frozenset({int, float, bool, type(None)})


def check_shape(request: object) -> None:
    """Raises `SpecInvalid` pointing at the first thing that no request can hold."""
    todo: list[tuple[Path, object]] = [((), request)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, str):
            _check_text(value, path)
        elif isinstance(value, Mapping):
            _check_keys(value, path)
            todo += _worth_a_look(value.items(), path)
        elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
            _check_length(value, path)
            todo += _worth_a_look(enumerate(value), path)
        elif not isinstance(value, int | float | None | BaseModel):
            raise _fault(f"a {type(value).__name__} is nothing JSON has: use mappings, lists, text and numbers", path)


def _worth_a_look(items: Iterable[tuple[Any, object]], path: Path) -> list[tuple[Path, object]]:
    """What lies in a container, less what nothing more has to be known of: nearly all of a request."""
    return [
        ((*path, step), value)
        for step, value in items
        if type(value) not in _PLAIN and not (type(value) is str and value.isascii())
    ]


def _check_text(text: str, path: Path) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _fault("this holds half of a surrogate pair, which is no character", path) from None


def _check_keys(value: Mapping[object, object], path: Path) -> None:
    if len(value) > MAX_KEYS:
        raise _fault(f"an object of {len(value)} keys; none here has more than {MAX_KEYS}", path)
    _check_depth(path)
    if _all_ascii(value):
        return
    for key in value:
        if not isinstance(key, str):
            raise _fault(f"a key must be text, not a {type(key).__name__}", path)
        _check_text(key, path)


def _all_ascii(keys: Iterable[object]) -> bool:
    try:
        return all(map(str.isascii, keys))  # type: ignore[arg-type]  # what is no text raises
    except TypeError:
        return False


def _check_length(value: Sequence[object], path: Path) -> None:
    if path == ("layers",) or (path[:1] == ("ranks",) and path[2:] == ("layers",)):
        if len(value) > MAX_LAYERS:
            raise _fault(f"layers has {len(value)} entries; at most {MAX_LAYERS} layers are planned", path)
    elif path == ("ranks",):
        if len(value) > MAX_RANKS:
            raise _fault(f"ranks has {len(value)} entries; at most {MAX_RANKS} ranks are planned", path)
    elif len(value) > MAX_ITEMS:
        raise _fault(f"an array of {len(value)} entries; none here has more than {MAX_ITEMS}", path)
    _check_depth(path)


def _check_depth(path: Path) -> None:
    if len(path) > MAX_DEPTH:
        raise _fault(f"this nests deeper than {MAX_DEPTH} levels; no request needs that", path)


def _fault(detail: str, path: Path) -> SpecInvalid:
    where = pointer(*path)
    return SpecInvalid(f"{where or 'the request'}: {shorten(detail)}", errors=[FieldError(where, shorten(detail))])
