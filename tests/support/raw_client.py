"""A client that does not follow the rules: it sends any bytes, need not wait for answers and need not read them."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvpage.wire import messages
from kvpage.wire.channel import FrameReader, close_fds, header
from kvpage.wire.messages import ReplyFrame, RequestFrame, Role

TIMEOUT_S = 60.0


class RawClient:
    """Blocking. Answers may be asked for in any order; descriptors that come with them are closed unless taken."""

    def __init__(self, socket_path: Path, *, hello: bool = True, role: Role = "client") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(str(socket_path))
        self._ids = itertools.count(1)
        self._reader = FrameReader()
        self._answers: dict[int, ReplyFrame] = {}
        self.fds: dict[int, list[int]] = {}
        """Descriptors by the id of the reply they came with."""
        if hello:
            self.ask(messages.Hello(version=messages.PROTOCOL_VERSION, role=role, client_name="raw"))

    def send(self, body: messages.RequestBody, fds: Sequence[int] = (), *, ack: int | None = None) -> int:
        """Send `fds`, which stay the caller's; id of the request."""
        request_id = next(self._ids)
        self.send_payload(messages.encode(RequestFrame(id=request_id, ack=ack, body=body)), fds)
        return request_id

    def send_payload(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        data = header(len(payload), len(fds)) + payload
        sent = socket.send_fds(self.socket, [data], fds)
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def answer(self, request_id: int) -> ReplyFrame:
        """The reply to `request_id`, whenever it comes. Raises EOFError when the worker hangs up before it."""
        while request_id not in self._answers:
            self._receive()
        return self._answers.pop(request_id)

    def ask(self, body: messages.RequestBody, fds: Sequence[int] = (), *, ack: int | None = None) -> ReplyFrame:
        return self.answer(self.send(body, fds, ack=ack))

    def hang_up_reason(self) -> str:
        """Code of the error with which the worker ends the connection, or "" when it just ends it."""
        try:
            error = self.answer(0).error
        except (EOFError, ConnectionResetError):
            return ""
        assert error is not None
        assert self._at_end(), "the worker told a reason and stayed"
        return error.code

    def _at_end(self) -> bool:
        try:
            return not self._reader.read(self.socket)
        except ConnectionResetError:
            return True

    def _receive(self) -> None:
        while (frame := self._reader.take()) is None:
            if not self._reader.read(self.socket):
                raise EOFError("the worker has ended the connection")
        reply = messages.decode_reply(frame.payload)
        self._answers[reply.id] = reply
        self.fds.setdefault(reply.id, []).extend(frame.fds)

    def close(self) -> None:
        self.socket.close()
        self._reader.close()
        for fds in self.fds.values():
            close_fds(fds)
        self.fds.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
