"""What a prefix cache tells routers: which block contents came and went, in order, as long as they keep up."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from kvpage.errors import SpecInvalid
from kvpage.pages.hashing import HASH_BYTES, split_hashes

DEFAULT_MOST_HASHES = 100_000


class Cursor(NamedTuple):
    """How far a reader has read: of which log, and up to which event, that one included."""

    log_id: str
    """32 hex digits, another for each log: after a restart numbers begin anew."""
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixEvent:
    number: int
    """Ascending by one, from 1."""
    kind: Literal["stored", "removed"]
    group: int
    data: bytes
    """The hashes, 16 bytes each. Stored: in the order of the sequence they are of."""

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return split_hashes(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    events: tuple[PrefixEvent, ...]
    cursor: Cursor
    """Read on from here."""
    has_missed: bool
    """Events after the cursor are gone, or it is another log's: ask for the whole state, and go on from that."""


class EventLog:
    """The last events, as many as have at most `most_hashes` hashes together. Readers keep their own cursors."""

    def __init__(self, most_hashes: int = DEFAULT_MOST_HASHES) -> None:
        if most_hashes < 1:
            raise SpecInvalid(f"an event log of {most_hashes} hashes keeps nothing; it needs at least 1")
        self.on_append: Callable[[], None] | None = None
        """Is called after each event, in the middle of what caused it."""
        self._most_hashes = most_hashes
        self._num_hashes = 0
        self._events: deque[PrefixEvent] = deque()
        self._log_id = secrets.token_hex(16)
        self._number = 0

    @property
    def cursor(self) -> Cursor:
        """After the last event."""
        return Cursor(self._log_id, self._number)

    def append(self, kind: Literal["stored", "removed"], group: int, hashes: bytes) -> None:
        """`hashes`: one after the other, 16 bytes each. Nothing for no hashes."""
        if not hashes:
            return
        self._number += 1
        self._events.append(PrefixEvent(number=self._number, kind=kind, group=group, data=hashes))
        self._num_hashes += len(hashes) // HASH_BYTES
        while self._num_hashes > self._most_hashes:
            self._num_hashes -= len(self._events.popleft().data) // HASH_BYTES
        if self.on_append is not None:
            self.on_append()

    def read(self, after: Cursor, at_most: int = 1_000) -> EventPage:
        """Up to `at_most` events after `after`, the oldest first. Raises `SpecInvalid` for less than one."""
        if at_most < 1:
            raise SpecInvalid(f"{at_most} events at a time never end; ask for 1 or more")
        first = self._number - len(self._events) + 1
        if after.log_id != self._log_id or not first - 1 <= after.number <= self._number:
            return EventPage(events=(), cursor=after, has_missed=True)
        start = after.number + 1 - first
        events = tuple(islice(self._events, start, start + at_most))
        return EventPage(events=events, cursor=Cursor(self._log_id, after.number + len(events)), has_missed=False)
