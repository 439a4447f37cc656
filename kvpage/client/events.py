"""Events of a server as a client reads them: cut out of the stream, and gone on with after each loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from kvpage.client.arguments import checked_optional, checked_text
from kvpage.client.block_resources import ContentEvent, MissedEvents, PoolEvent
from kvpage.client.calls import MAX_ANSWER_BYTES, Request
from kvpage.client.patience import Patience
from kvpage.client.problem import beginning, error_of
from kvpage.errors import DeviceUnavailable, KvpageError, ProtocolError, shorten

SILENCE_S = 15.0
"""The server says something at least so often."""

EventData: TypeAlias = ContentEvent | MissedEvents | PoolEvent
_DATA: dict[str, type[EventData]] = {
    "stored": ContentEvent,
    "removed": ContentEvent,
    "missed": MissedEvents,
    "pool": PoolEvent,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str
    """`stored` and `removed` come with a `ContentEvent`, `missed` with `MissedEvents`, `pool` with a `PoolEvent`."""
    data: EventData
    id: str
    """Events after this one are those that `events(after=id)` begins with."""


class EventReading:
    """Where one reader is. Whoever carries it sends what `begin` says and feeds it what comes back."""

    def __init__(
        self,
        pool_id: str | None,
        after: str | None,
        timeout_s: float,
        on_loss: Callable[[KvpageError], None] | None = None,
    ) -> None:
        self._pool_id = checked_optional("pool_id", pool_id)
        self._id = "" if after is None else checked_text("after", after)
        self._timeout_s = timeout_s
        self._on_loss = on_loss
        self._patience: Patience | None = None
        """While there is no stream."""
        self._rest = b""
        self.is_over = False
        """The only pool of it has gone."""

    def begin(self) -> Request:
        """The request for a stream that goes on where the one before was left."""
        self._rest = b""
        headers = {"Last-Event-ID": self._id} if self._id else {}
        query = None if self._pool_id is None else {"pool_id": self._pool_id}
        return Request(method="GET", path="/v1/events", query=query, headers=headers, wait_s=SILENCE_S)

    def feed(self, status: int, part: bytes) -> Iterator[Event]:
        """Events that are whole now. Raises `ProtocolError` for what is none."""
        self._rest += part
        if len(self._rest) > MAX_ANSWER_BYTES:
            raise ProtocolError(f"an event has more than {MAX_ANSWER_BYTES} bytes, as no event of kvpage has")
        if status != 200:
            return  # a problem, which is read to its end
        self._patience = None
        *blocks, self._rest = self._rest.split(b"\n\n")
        for block in blocks:
            event = _event(block)
            if event is not None:
                self._id = event.id
                is_gone = isinstance(event.data, PoolEvent) and event.data.state == "deleted"
                self.is_over = is_gone and self._pool_id is not None
                yield event

    def end(self, status: int) -> None:
        """The answer has ended. Raises what it was, unless all has been told."""
        if status != 200:
            raise error_of(status, self._rest)
        if not self.is_over:
            raise DeviceUnavailable("the server has ended the stream of events")

    def pause_s(self, error: KvpageError) -> float:
        """How long to wait before the next stream. Raises `error` when it would not be worth it."""
        if self._patience is None:
            self._patience = Patience(self._timeout_s)
            if self._on_loss is not None and error.retryable:
                self._on_loss(error)
        return self._patience.pause_s(error)


def _event(block: bytes) -> Event | None:
    """None for comments."""
    try:
        lines = dict(line.partition(": ")[::2] for line in block.decode().split("\n"))
        kind = lines.get("event")
        if kind is None:
            return None
        return Event(kind=kind, data=msgspec.json.decode(lines["data"], type=_DATA[kind]), id=lines["id"])
    except (ValueError, KeyError, RecursionError) as error:  # those of msgspec and UnicodeDecodeError too
        raise ProtocolError(f"an event of the server is none: {shorten(str(error))}; {beginning(block)}") from error
