"""What a coordinator asks of the allocator of a node, and the answers: JSON, whatever carries it."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from kvpage.errors import KvpageError, ProtocolError, error_from_code, shorten
from kvpage.fleet.records import FleetRecord, NodeReport


class Look(msgspec.Struct, frozen=True, tag=True):
    """Say what is there. Changes nothing."""


class Read(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Give the whole record."""

    id: str


class Reserve(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write the record, and make the pools of this node's ranks: all of them or none."""

    record: FleetRecord


class Commit(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What is reserved stays."""

    id: str


class Abort(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Give back what is reserved; refused for what is committed."""

    id: str


class Restore(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make what is missing of a committed plan; what is there is left as it is."""

    record: FleetRecord


class Release(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Give the pools back. The record stays until all nodes know, else one that was away would bring the plan back."""

    record: FleetRecord
    force: bool = False


class Drop(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Forget a released record."""

    id: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the service that the allocator started."""


Message: TypeAlias = Look | Read | Reserve | Commit | Abort | Restore | Release | Drop | Stop


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Report(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    report: NodeReport


class Record(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    record: FleetRecord


class Failed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The error that the node raised."""

    code: str
    message: str
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, error: KvpageError) -> Failed:
        return cls(code=error.code, message=error.message, details=error.details)

    @property
    def error(self) -> KvpageError:
        return error_from_code(self.code, self.message, details=self.details)


Answer: TypeAlias = Done | Report | Record | Failed


def encode(value: Message | Answer) -> bytes:
    return msgspec.json.encode(value)


def decode_message(data: bytes) -> Message:
    """Raises `ProtocolError`."""
    try:
        return msgspec.json.decode(data, type=Message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message to an allocator: {shorten(str(error))}") from error


def decode_answer(data: bytes) -> Answer:
    """Raises `ProtocolError`, as when the node has another version of kvpage."""
    try:
        return msgspec.json.decode(data, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not the answer of an allocator: {shorten(str(error))}") from error
