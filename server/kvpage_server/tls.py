"""TLS on the TCP port; the Unix socket stays plain, where the kernel says who the peer is.

uvicorn would put TLS on every socket, or none, and would not count connections that are still shaking hands.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Hashable
from typing import TypeAlias

from kvpage_server.intake import Intake
from kvpage_server.tls_files import TlsContext

_AGAIN_S = 1.0  # when no connection could be accepted: no descriptor is free
NewProtocol: TypeAlias = Callable[[], asyncio.Protocol]
logger = logging.getLogger("kvpage.api")


class Securing:
    """Accepts connections of listening sockets and hands them over once they are secured. Owns none of the sockets."""

    def __init__(self, context: TlsContext, intake: Intake) -> None:
        self._context = context
        self._intake = intake
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    def serve(self, sock: socket.socket, protocol: NewProtocol) -> None:
        """`protocol`: makes that of one connection. From the event loop."""
        sock.setblocking(False)
        self._accepting.append(asyncio.ensure_future(self._accept_all(sock, protocol)))

    async def close(self) -> None:
        """Accept no more, and drop who is still shaking hands. May be called twice."""
        tasks = [*self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept_all(self, sock: socket.socket, protocol: NewProtocol) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(sock)
            except OSError as error:
                logger.error("cannot accept connections over TLS: %s", error)
                await asyncio.sleep(_AGAIN_S)
                continue
            self._shake_hands(connection, address[0], protocol)

    def _shake_hands(self, connection: socket.socket, peer: str, protocol: NewProtocol) -> None:
        task = asyncio.ensure_future(self._secure(connection, protocol))
        share, member = self._intake.handshakes, _Handshake(task, peer, self._intake.next_turn())
        self._handshakes.add(task)

        def done(_: object) -> None:
            self._handshakes.discard(task)
            share.leave(member)
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                logger.debug("a connection of %s was not secured: %s", peer, error or "another took its place")
                connection.close()

        task.add_done_callback(done)
        share.enter(member)  # raises nothing: every handshake waits for its client, so the oldest gives way

    async def _secure(self, connection: socket.socket, protocol: NewProtocol) -> None:
        """Raises OSError, of which ssl.SSLError is one, when the client does not do its part in time."""
        limits = self._intake.limits
        await asyncio.get_running_loop().connect_accepted_socket(
            protocol,
            connection,
            ssl=self._context.current(),
            ssl_handshake_timeout=limits.head_s,
            ssl_shutdown_timeout=limits.linger_s,
        )


class _Handshake:
    """In its share: a member that always waits for its client."""

    unread_bytes = 0

    def __init__(self, task: asyncio.Task[None], peer: Hashable, since: int) -> None:
        self.peer = peer
        self._task = task
        self._since = since

    def waits_since(self) -> int:
        return self._since

    def give_way(self) -> None:
        self._task.cancel()

    def drop(self) -> None:
        self._task.cancel()
