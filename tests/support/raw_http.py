"""HTTP as bytes: a connection that sends anything and shows every answer it gets."""

from __future__ import annotations

import contextlib
import re
import socket
from typing import Self

import httpx

from support.api_service import ApiService

TIMEOUT_S = 60.0
_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r]*((?:\r\n[^\r]+)*)\r\n\r\n")


class RawHttp:
    """`over`: "unix" or "tcp". `<host>` in what is sent becomes the name of the server."""

    def __init__(self, service: ApiService, over: str = "tcp") -> None:
        self._host = service.url.partition("://")[2]
        if over == "unix":
            self.socket = socket.socket(socket.AF_UNIX)
            address: str | tuple[str, int] = str(service.run_directory.api_socket)
        else:
            self.socket = socket.socket(socket.AF_INET)
            host, port = self._host.split(":")
            address = (host, int(port))
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(address)
        self._received = b""

    def send(self, data: bytes) -> None:
        """What the server does not take any more is left out."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data.replace(b"<host>", self._host.encode()))

    def answer(self) -> httpx.Response:
        """The next one, whose length must be declared. Raises EOFError when the server closes instead."""
        while (found := _HEAD.match(self._received)) is None:
            self._receive()
        headers = [line.partition(b": ")[::2] for line in found[2].split(b"\r\n") if line]
        length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
        while len(self._received) < found.end() + length:
            self._receive()
        body = self._received[found.end() : found.end() + length]
        self._received = self._received[found.end() + length :]
        return httpx.Response(int(found[1]), headers=headers, content=body)

    def is_closed(self) -> bool:
        """Whether the server ends the connection, saying nothing more."""
        try:
            self._receive()
        except EOFError:
            return self._received == b""
        return False

    def _receive(self) -> None:
        try:
            piece = self.socket.recv(1 << 16)
        except ConnectionResetError:
            piece = b""
        if not piece:
            raise EOFError(f"the server closed the connection after {self._received!r}")
        self._received += piece

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
