"""What all connections together may take from the API process, and how long each may take over a request.

The Unix socket and TCP have a share each: nobody in the network can keep out who is on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.errors import RateLimited, TooManyClients

_FD_SHARE = 4  # one in so many descriptors for each kind of connection; the others are for pools and workers


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    max_connections: int = 512
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
    """How long a client may read nothing of what waits for it."""
    linger_s: float = 2.0
    """How long a connection that was refused may go on sending, so that it can read why."""


class Share:
    """What the connections of one kind have taken. Used from the event loop only."""

    def __init__(self, kind: str, limits: IntakeLimits, max_fds: int) -> None:
        """`max_fds`: how many descriptors this process may have open."""
        self._kind = kind
        self._limits = limits
        self._max_connections = max(1, min(limits.max_connections, max_fds // _FD_SHARE))
        self.num_connections = 0
        self.large_bodies_bytes = 0

    def __repr__(self) -> str:
        return f"<Share {self._kind}: {self.num_connections} connections, {self.large_bodies_bytes} bytes of bodies>"

    def enter(self) -> None:
        """One more connection, which must `leave`. Raises `TooManyClients`."""
        if self.num_connections >= self._max_connections:
            raise TooManyClients(
                f"the server has {self.num_connections} connections over {self._kind} and takes no more; close some",
                details={"limit": self._max_connections},
            )
        self.num_connections += 1

    def leave(self) -> None:
        self.num_connections -= 1

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
    """The limits and both shares; one for each server."""

    def __init__(self, limits: IntakeLimits, max_fds: int) -> None:
        self.limits = limits
        self.unix = Share("the Unix socket", limits, max_fds)
        self.tcp = Share("TCP", limits, max_fds)
