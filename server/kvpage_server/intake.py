"""What all connections together may take from the API process, and how long each may take over a request.

The Unix socket and TCP have a share each: nobody in the network can keep out who is on the machine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from kvpage.errors import RateLimited, TooManyClients

_FD_SHARE = 4  # one in so many descriptors for each kind of connection; the others are for pools and workers


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    max_connections: int = 1024
    """Of each kind, Unix socket and TCP; fewer where this process may open few files."""
    max_pipelined: int = 16
    """Requests of one connection that wait for the answer to an earlier one."""
    max_head_bytes: int = 64 << 10
    """Of a request line with its headers; also of what lies between two pieces of a body, and of trailers."""
    max_body_bytes: int = 4 << 20
    small_body_bytes: int = 64 << 10
    """Bodies up to this size are always taken: so many as there are connections do no harm."""
    max_large_bodies_bytes: int = 64 << 20
    """Larger bodies that are not answered yet, of each kind of connection."""
    head_s: float = 10.0
    """From the connection, or from the first byte of a later request, to the end of its headers."""
    body_s: float = 30.0
    """From the end of the headers to the end of the body."""
    unread_s: float = 30.0
    """How long a client may take over `min_read_bytes` of what waits for it."""
    min_read_bytes: int = 16 << 10
    max_unread_bytes: int = 256 << 20
    """Of answers that clients have not read, of each kind of connection. Beyond it, whoever has most unread goes."""
    linger_s: float = 2.0
    """How long a connection that was refused may go on sending, so that it can read why."""


class Member(Protocol):
    """A connection as its share sees it."""

    unread_bytes: int

    @property
    def peer(self) -> Hashable:
        """Whose it is: the same for all connections of a process on this machine, or of an address in the network."""

    def waits_since(self) -> int | None:
        """Since which turn of the intake nothing is being done for it; None while something is."""

    def give_way(self) -> None:
        """End: another needs its place."""

    def drop(self) -> None:
        """End at once, and send nothing any more."""


class Share:
    """What the connections of one kind have taken. Used from the event loop only."""

    def __init__(self, kind: str, limits: IntakeLimits, max_fds: int) -> None:
        """`max_fds`: how many descriptors this process may have open."""
        self._kind = kind
        self._limits = limits
        self._max_connections = max(1, min(limits.max_connections, max_fds // _FD_SHARE))
        self._members: set[Member] = set()
        self.large_bodies_bytes = 0
        self.unread_bytes = 0

    def __repr__(self) -> str:
        return f"<Share {self._kind}: {self.num_connections} connections, {self.large_bodies_bytes} bytes of bodies>"

    @property
    def num_connections(self) -> int:
        return len(self._members)

    def enter(self, member: Member) -> None:
        """One more connection, which must `leave`. Where there is no place, one that nothing is done for gives way.

        Raises `TooManyClients`.
        """
        if self.num_connections >= self._max_connections:
            gives_way = self._who_gives_way()
            if gives_way is None:
                raise TooManyClients(
                    f"all {self.num_connections} connections that {self._kind} may have are in use; close some",
                    details={"limit": self._max_connections},
                )
            self.leave(gives_way)
            gives_way.give_way()
        self._members.add(member)

    def _who_gives_way(self) -> Member | None:
        """Of those that wait for their client, one of whoever has most connections, the one that waits longest."""
        num_of = Counter(member.peer for member in self._members)
        waiting = [
            (num_of[member.peer], -since, member)
            for member in self._members
            if (since := member.waits_since()) is not None
        ]
        return max(waiting, key=lambda entry: entry[:2])[2] if waiting else None

    def leave(self, member: Member) -> None:
        """May be called twice."""
        if member in self._members:
            self._members.remove(member)
            self.unread(member, 0)

    def unread(self, member: Member, num_bytes: int) -> None:
        """So many bytes of answers wait for the member's client. May drop somebody."""
        self.unread_bytes += num_bytes - member.unread_bytes
        member.unread_bytes = num_bytes
        if self.unread_bytes > self._limits.max_unread_bytes and self._members:
            max(self._members, key=lambda one: one.unread_bytes).drop()

    def take(self, num_bytes: int) -> None:
        """More of a large body, to be given back. Raises `RateLimited`."""
        limit = self._limits.max_large_bodies_bytes
        if self.large_bodies_bytes + num_bytes > limit:
            raise RateLimited(
                f"bodies over {self._limits.small_body_bytes} bytes that wait for their answers have {limit} bytes "
                f"over {self._kind} already; send this one again later, or write repeated layers once with `count`",
                details={"limit_bytes": limit},
            )
        self.large_bodies_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.large_bodies_bytes -= num_bytes


class Intake:
    """The limits and the shares; one for each server."""

    def __init__(self, limits: IntakeLimits, max_fds: int) -> None:
        self.limits = limits
        self.unix = Share("the Unix socket", limits, max_fds)
        self.tcp = Share("TCP", limits, max_fds)
        self.handshakes = Share("TCP before TLS", limits, max_fds)
        self._turns = itertools.count(1)

    def next_turn(self) -> int:
        """Says what came before what; a clock has the same time for what comes soon after."""
        return next(self._turns)
