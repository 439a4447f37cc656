"""One `GET` of a probe, with the standard library only: it runs every few seconds, so it must start quickly."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvpage.cli.where import Where
from kvpage.errors import DeviceUnavailable, KvpageError, PermissionDenied, ProtocolError, SpecInvalid, shorten
from kvpage.run_directory import RunDirectory
from kvpage.strict_json import loads

_MAX_ANSWER_BYTES = 1 << 20
_PART_BYTES = 65536
_STATUS_LINE = re.compile(rb"HTTP/1\.[0-9] +([1-9][0-9]{2})(?= |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    status: int
    """Of HTTP."""
    told: dict[str, Any]
    """The answer, which is a JSON object."""


def get(where: Where, target: str, timeout_s: float) -> Found:
    """Raises `DeviceUnavailable` when nobody answers within `timeout_s` in all, `ProtocolError` for what is no answer
    of kvpage, `SpecInvalid` for a URL that is none.
    """
    place = where.url or str(RunDirectory.default(where.run_dir).api_socket)
    try:
        if where.url is None:
            status, body = _over_socket(place, target, time.monotonic() + timeout_s)
        else:
            status, body = _over_url(where, target, timeout_s)
    except TimeoutError as error:
        raise DeviceUnavailable(f"the kvpage server at {place} did not answer within {timeout_s:g} s") from error
    except OSError as error:
        if type(error).__module__ == "ssl":
            from kvpage.client.trust import not_secured

            raise PermissionDenied(not_secured(place, error)) from error
        raise DeviceUnavailable(f"no kvpage server answers at {place}: {error.strerror or error}") from error
    try:
        told = loads(body)
    except KvpageError:
        told = None
    if not isinstance(told, dict):
        raise ProtocolError(f"what answers at {place} is no kvpage server: {shorten(repr(body[:80]))}")
    return Found(status=status, told=told)


def _over_socket(path: str, target: str, deadline_s: float) -> tuple[int, bytes]:
    """Importing an HTTP client would take as long as all the rest."""
    parts: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        _bound(sock, deadline_s)
        sock.connect(path)
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: kvpage\r\nConnection: close\r\n\r\n".encode())
        while sum(map(len, parts)) < _MAX_ANSWER_BYTES:
            _bound(sock, deadline_s)
            part = sock.recv(_PART_BYTES)
            if not part:
                break
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    status = _STATUS_LINE.match(head.split(b"\r\n")[0])
    if status is None:
        raise ProtocolError(f"what answers at {path} is no kvpage server: {shorten(repr(head[:80]))}")
    return int(status[1]), body


def _bound(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)


def _over_url(where: Where, target: str, timeout_s: float) -> tuple[int, bytes]:
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    url = shorten(str(where.url))
    trusted = _trusted(where)
    try:
        parsed = urlsplit(str(where.url))
        host, port = parsed.hostname or "", parsed.port
        if parsed.scheme == "https":
            connection: HTTPConnection = HTTPSConnection(host, port, timeout=timeout_s, context=trusted)
        else:
            connection = {"http": HTTPConnection}[parsed.scheme](host, port, timeout=timeout_s)
    except (ValueError, KeyError, HTTPException) as error:
        raise SpecInvalid(f"url {url!r} is not one; use http://HOST:PORT or https://HOST:PORT") from error
    token = where.token()
    try:
        connection.request("GET", target, headers={} if token is None else {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_ANSWER_BYTES)
    except HTTPException as error:
        hint = "; if it serves TLS, its address begins with https://" if parsed.scheme == "http" else ""
        raise ProtocolError(f"what answers at {url} is no kvpage server: {shorten(repr(error))}{hint}") from error
    finally:
        connection.close()


def _trusted(where: Where) -> Any:
    """An SSL context; None for the common authorities. Raises `SpecInvalid` for a file that holds none."""
    if where.ca_file is None:
        return None
    from kvpage.client.trust import context_of  # `ssl` takes as long as all the rest

    return context_of(where.ca_file)
