"""What messages are made of: the types of their fields, and the two kinds of struct."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvpage.errors import SpecInvalid, printable, shorten

MAX_SIZE_BYTES = 2**62
MAX_NAME_BYTES = 256
MAX_WAIT_S = 3600

Id: TypeAlias = Annotated[int, Meta(ge=0)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_BYTES)]
SizeBytes: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_SIZE_BYTES)]
PlanId: TypeAlias = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Epoch: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
PoolId: TypeAlias = Annotated[str, Meta(pattern=r"^pool-[0-9a-f]{16}\Z")]
WaitS: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]
Role: TypeAlias = Literal["client", "api"]


def check_name(what: str, name: str) -> None:
    """Raises `SpecInvalid` for a name that is too long or that a terminal would obey instead of show."""
    length = len(name.encode("utf-8", "surrogatepass"))
    if length > MAX_NAME_BYTES or not name.isprintable():
        raise SpecInvalid(
            f"{what} {shorten(name)} has {length} bytes or characters that cannot be printed; use at most"
            f" {MAX_NAME_BYTES} bytes of printable text",
            details={"length_bytes": length, "limit_bytes": MAX_NAME_BYTES},
        )


def as_name(text: str) -> str:
    """What `check_name` lets pass of any text."""
    return printable(text[:MAX_NAME_BYTES]).encode()[:MAX_NAME_BYTES].decode(errors="ignore")


def _snake_case(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message."""


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=_snake_case):
    """A message; its field `type` carries the name."""
