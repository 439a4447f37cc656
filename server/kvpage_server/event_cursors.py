"""How far a reader of events has read, in one word that it need not understand."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from kvpage.errors import SpecInvalid
from kvpage.wire.values import Id, PoolId

MAX_WORD_CHARS = 60_000  # what a header may have

_Value = TypeVar("_Value")
_LogId: TypeAlias = Annotated[str, Meta(max_length=32)]


class Cursor(NamedTuple):
    """In the log of one pool."""

    log_id: str
    number: int


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pool_id: PoolId
    log_id: _LogId
    number: Id


class ContentsPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the next page of a list of contents begins, and where events are read on from after all of them."""

    log_id: _LogId
    number: Id
    last_block: Annotated[int, Meta(ge=0, lt=2**32)]


def as_word(cursors: Mapping[str, Cursor]) -> str:
    return _encoded([_Place(pool_id, *cursor) for pool_id, cursor in cursors.items()])


def cursors_of(word: str) -> dict[str, Cursor]:
    """By pool id. Raises `SpecInvalid` for what `as_word` has not made."""
    places = _decoded(word, list[_Place], "Last-Event-ID")
    return {place.pool_id: Cursor(place.log_id, place.number) for place in places}


def as_page_token(place: ContentsPlace) -> str:
    return _encoded(place)


def contents_place(token: str) -> ContentsPlace:
    """Raises `SpecInvalid` for what `as_page_token` has not made."""
    return _decoded(token, ContentsPlace, "page_token")


def _encoded(value: object) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(value)).decode()


def _decoded(word: str, kind: type[_Value], what: str) -> _Value:
    try:
        if len(word) > MAX_WORD_CHARS:
            raise ValueError("it is too long")
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(word.encode("ascii")), type=kind)
    except (ValueError, binascii.Error, RecursionError) as error:  # those of msgspec too
        raise SpecInvalid(f"{what} is none of this API's; send back the last one it gave, or none") from error
