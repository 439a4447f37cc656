"""Going on in HTTP/1.1 after a request that would rather have another protocol.

The parser takes all behind the head of such a request for the other protocol, its body too. Another parser, which has
read a head of the same framing, goes on there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import httptools

_FRAMING = (b"content-length", b"transfer-encoding")
_START = b"POST / HTTP/1.1\r\n"


class Parsed(Protocol):
    """Whom a parser tells; the methods of uvicorn's protocol."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


def has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """By the headers of a request that the parser has accepted."""
    framing = dict(headers)
    return b"transfer-encoding" in framing or framing.get(b"content-length", b"0").strip(b"0") != b""


def parser_behind(headers: Iterable[tuple[bytes, bytes]], parsed: Parsed) -> httptools.HttpRequestParser:
    """A parser for what comes after a head with these headers."""
    head = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING)
    behind = _Behind(parsed)
    parser = httptools.HttpRequestParser(behind)
    parser.feed_data(_START + head + b"\r\n")
    behind.is_reading_again = False
    return parser


class _Behind:
    """Tells all but the head that is read again."""

    def __init__(self, parsed: Parsed) -> None:
        self._parsed = parsed
        self.is_reading_again = True
        self.on_body = parsed.on_body
        self.on_message_complete = parsed.on_message_complete

    def on_message_begin(self) -> None:
        if not self.is_reading_again:
            self._parsed.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.is_reading_again:
            self._parsed.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_reading_again:
            self._parsed.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.is_reading_again:
            self._parsed.on_headers_complete()
