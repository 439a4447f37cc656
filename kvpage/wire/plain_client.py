"""A worker's client for requests that bring no descriptors: one system call to ask and one to hear the answer.

What `WorkerClient` does for descriptors, so that none is lost whenever a signal handler raises, costs as much as the
worker takes for the answer. Here nothing can be lost but the connection.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import weakref
from pathlib import Path
from typing import TypeVar

from kvpage.errors import Conflict, ProtocolError, SpecInvalid, TooLarge, WorkerLost, shorten
from kvpage.run_directory import checked_socket_path
from kvpage.wire import messages
from kvpage.wire.channel import MAX_FRAME_BYTES, header
from kvpage.wire.connecting import connect

_Body = TypeVar("_Body", bound=messages.Body)
_HEADER_BYTES = 8
_LENGTH = struct.Struct("<I")
_READ_BYTES = 64 << 10


class PlainClient:
    """A connection to a device worker. Threads take turns. In a forked child it is closed."""

    def __init__(self, socket_path: str | os.PathLike[str], *, client_name: str = "", timeout_s: float = 10.0) -> None:
        """Connect and say hello. `timeout_s`: for each answer. Raises as `WorkerClient` does."""
        self._path = checked_socket_path(Path(socket_path))
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._is_asking = False
        self._ids = itertools.count(1)
        self._data = bytearray(_READ_BYTES)
        self._timed_s = -1.0
        self._socket: socket.socket | None = connect(self._path, timeout_s)
        self._socket.setblocking(True)
        _clients.add(self)
        try:
            hello = messages.Hello(version=messages.PROTOCOL_VERSION, role="client", client_name=client_name)
            self.welcome = self.ask(hello, messages.Welcome)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<PlainClient {self._path} {'closed' if self.closed else 'open'}>"

    @property
    def closed(self) -> bool:
        """Also when an answer did not come, or an exception came in between."""
        return self._socket is None

    def close(self) -> None:
        """May be called twice."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def close_with(self, body: messages.RequestBody) -> None:
        """Close, with a last request that is not answered. Never waits and never raises: finalisers may call it."""
        sock = self._socket
        if sock is not None and not self._is_asking:
            payload = messages.encode(messages.RequestFrame(id=0, body=body))
            with contextlib.suppress(OSError):
                sock.send(header(len(payload), 0) + payload, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        self.close()

    def ask(self, body: messages.RequestBody, kind: type[_Body], *, wait_s: float = 0.0) -> _Body:
        """The worker's answer. `wait_s`: how much longer than usual it may take.

        Raises the error the worker answered with, or `WorkerLost` when the connection has ended or no answer came in
        time; it is closed then, as a late answer could be taken for another's. `Conflict` from a signal handler or
        finaliser in the middle of a request of the same thread.
        """
        with self._lock:
            if self._is_asking:
                raise Conflict("a signal handler or finaliser asked in the middle of a request of the same thread")
            request_id = next(self._ids)
            payload = _encoded(messages.RequestFrame(id=request_id, body=body))
            self._is_asking = True
            try:
                reply = self._exchange(request_id, payload, wait_s)
            except BaseException:
                self.close()
                raise
            finally:
                self._is_asking = False
        if reply.error is not None:
            if reply.id == 0:
                self.close()
            raise reply.error.to_error()
        if type(reply.body) is not kind:
            raise ProtocolError(f"the worker answered {type(body).__name__} with {type(reply.body).__name__}")
        return reply.body

    def _exchange(self, request_id: int, payload: bytes, wait_s: float) -> messages.ReplyFrame:
        sock = self._socket
        if sock is None:
            raise WorkerLost(f"the connection to {self._path} has ended; connect again")
        if self.timeout_s + wait_s != self._timed_s:
            self._limit_time(sock, self.timeout_s + wait_s)
        self._send(sock, header(len(payload), 0) + payload)
        reply = messages.decode_reply(self._receive(sock))
        if reply.id != request_id and not (reply.id == 0 and reply.error is not None):
            raise ProtocolError(f"the worker answered request {reply.id}, request {request_id} was asked")
        return reply

    def _limit_time(self, sock: socket.socket, timeout_s: float) -> None:
        seconds, rest_s = divmod(max(timeout_s, 0.001), 1)
        timeval = struct.pack("@ll", int(seconds), int(rest_s * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeval)
        self._timed_s = timeout_s

    def _send(self, sock: socket.socket, data: bytes) -> None:
        try:
            sent = sock.send(data, socket.MSG_NOSIGNAL)
            while sent < len(data):
                sent += sock.send(memoryview(data)[sent:], socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise WorkerLost(f"the worker at {self._path} took no request in time") from error
        except (BrokenPipeError, ConnectionResetError):
            return  # it may have said why

    def _receive(self, sock: socket.socket) -> memoryview:
        """The payload of one frame; right until the next one is received."""
        data = self._data
        try:
            num_bytes = self._receive_some(sock, 0)
            while num_bytes < _HEADER_BYTES:
                num_bytes += self._receive_some(sock, num_bytes)
            (length,) = _LENGTH.unpack_from(data)
            if not 0 < length <= MAX_FRAME_BYTES or data[4:_HEADER_BYTES] != bytes(4):
                raise ProtocolError(f"the worker sent a frame of {length} bytes and header {data[:8].hex()}")
            end = _HEADER_BYTES + length
            if len(data) < end:
                data.extend(bytes(end - len(data)))
            while num_bytes < end:
                num_bytes += self._receive_some(sock, num_bytes)
        except BlockingIOError as error:
            raise WorkerLost(f"the worker at {self._path} did not answer in time") from error
        except OSError as error:
            raise WorkerLost(f"the connection to the worker at {self._path} broke: {error.strerror}") from error
        if num_bytes > end:
            raise ProtocolError(f"{num_bytes - end} bytes came that nobody asked for")
        return memoryview(data)[_HEADER_BYTES:end]

    def _receive_some(self, sock: socket.socket, start: int) -> int:
        num_bytes = sock.recv_into(memoryview(self._data)[start:]) if start else sock.recv_into(self._data)
        if not num_bytes:
            raise WorkerLost(f"the worker at {self._path} has ended the connection")
        return num_bytes


def _encoded(frame: messages.RequestFrame) -> bytes:
    """Raises `SpecInvalid` for what cannot be said, `TooLarge` for what is too long."""
    kind = type(frame.body).__name__
    try:
        payload = messages.encode(frame)
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecInvalid(f"a {kind} request cannot be sent: {shorten(str(error))}") from error
    if len(payload) > MAX_FRAME_BYTES:
        raise TooLarge(f"a {kind} request of {len(payload)} bytes; the limit is {MAX_FRAME_BYTES}")
    return payload


_clients: weakref.WeakSet[PlainClient] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    for client in list(_clients):
        client._lock = threading.RLock()  # another thread may have had it
        client.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
