"""The server's HTTP protocol: guarded, and with the caller's credentials in every request."""

from __future__ import annotations

import asyncio
import os
import socket

from kvpage.wire.credentials import peer_of, supplementary_groups
from kvpage_server.access import Caller
from kvpage_server.guarded_protocol import GuardedProtocol


class PeerAwareProtocol(GuardedProtocol):
    """Puts a `Caller` into `scope["state"]["caller"]`; over TCP there is none. `scope["state"]["connection"]` is the
    socket, to be looked at.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        sock = transport.get_extra_info("socket")
        self.app_state = {**self.app_state, "connection": sock}
        if sock.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, "caller": _caller(sock.fileno())}
        super().connection_made(transport)


def _caller(fd: int) -> Caller:
    """Calls nothing that lets go of the interpreter, as `dup` and `close` do: while plans are computed each would wait
    for their threads, and all connections that have come meanwhile behind it.
    """
    # A socket object of our own for the same descriptor: the loop's stand-in has no getsockopt.
    borrowed = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)
    try:
        peer = peer_of(borrowed)
        is_known = peer.uid in (0, os.geteuid())  # whose groups then do not matter
        return Caller(peer=peer, groups=frozenset() if is_known else supplementary_groups(borrowed))
    finally:
        borrowed.detach()  # the loop's to close
