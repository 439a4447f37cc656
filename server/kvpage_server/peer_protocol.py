"""uvicorn's HTTP protocol, with the caller's credentials in every request and a bound on the size of a request's head.

It leans on uvicorn's `app_state`, `send_400_response` and the parser's callbacks; tests of a real server hold them.
"""

from __future__ import annotations

import asyncio
import os
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvpage.wire.credentials import peer_of, supplementary_groups
from kvpage_server.access import Caller

MAX_HEAD_BYTES = 64 * 1024


class PeerAwareProtocol(HttpToolsProtocol):
    """Puts a `Caller` into `scope["state"]["caller"]`; over TCP there is none."""

    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        sock = transport.get_extra_info("socket")
        if sock.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, "caller": _caller(sock.fileno())}
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request line and headers are too large.")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()


def _caller(fd: int) -> Caller:
    # A socket of our own over the same connection: the loop's stand-in object has no getsockopt.
    with socket.socket(fileno=os.dup(fd)) as own:
        peer = peer_of(own)
        is_known = peer.uid in (0, os.geteuid())  # whose groups then do not matter
        return Caller(peer=peer, groups=frozenset() if is_known else supplementary_groups(own))
