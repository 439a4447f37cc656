"""Bytes that are almost HTTP: whatever comes, the answer is a proper one or the end of the connection, never a mistake
of the server's, and never a second answer to what was one request.
"""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Callable

from support.api_service import ApiService
from support.attacked_service import Bystander, Remains, attacked_service, conclude, losing
from support.plan_requests import small_request
from support.tally import Tally

HASTY = {"head_s": 0.5, "body_s": 0.5, "unread_s": 1.0, "linger_s": 0.1}
_BODY = json.dumps(small_request()).encode()
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_PATHS = (
    b"/livez", b"/v1/plans", b"/v1/pools", b"/v1/devices", b"/metrics", b"/v1/events", b"/openapi.json", b"/errors",
    b"*", b"/v1/pools/pool-0123456789abcdef", b"/v1/leases/x", b"/ui", b"/ui/../../etc/passwd", b"//livez",
    b"/livez/", b"", b"/%00", b"/v1/plans/%ff%fe", b"/v1/plans/%", b"/v1/plans/%zz", b"/v1/plans/\x00",
    b"/%2e%2e/%2e%2e", b"/\xff\xfe", b"http://evil/livez", b"/livez#a", b"/livez?" + b"a=b&" * 500,
    b"/v1/plans/sha256:" + b"0" * 64, b"/v1/pools?wait=nan",
)  # fmt: skip
_METHODS = (
    b"GET", b"POST", b"DELETE", b"HEAD", b"OPTIONS", b"PUT", b"PATCH", b"TRACE", b"CONNECT", b"PRI", b"get", b"",
    b"G\x00T",
)  # fmt: skip
_VERSIONS = (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.11", b"http/1.1")
_HEADERS = (
    b"Content-Length: 0", b"Content-Length: 5", b"Content-Length: 5, 6", b"Content-Length: +5",
    b"Content-Length: 0x5", b"Content-Length:  5 ", b"Content-Length: ", b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding: identity",
    b"Transfer-Encoding:\x0bchunked", b"Transfer-Encoding: xchunked", b"Expect: 100-continue", b"Expect: 200-ok",
    b"Upgrade: websocket", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c",
    b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA", b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", b"Connection: close",
    b"Connection: keep-alive, close, keep-alive", b"Range: bytes=0-10", b"Range: bytes=-1,0-,5-2", b"Host: a",
    b"Host:", b"Authorization: Bearer " + b"x" * 9000, b"X-Request-ID: " + b"\xf0\x9f\x98\x80" * 9,
    b"Cookie: " + b"a=b;" * 900, b"If-None-Match: " + b'"a",' * 900, b"Accept-Encoding: gzip;q=nan, *;q=-1, br",
    b"Prefer: wait=1e99", b"Last-Event-ID: \xff", b"Content-Type: application/json; charset=\xff",
    b"Content-Encoding: gzip", b" folded: line", b"\tobs", b"nocolon", b": empty", b"X-A: b\rC: d", b"X-\x00: a",
    b"X: \x7f\x01", b"TE: trailers", b"Trailer: Content-Length", b"Forwarded: for=1", b"X" * 3000 + b": a",
)  # fmt: skip
_BODIES = (
    b"", _BODY, b"{}", b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhel", b"ffffffffffffffff\r\n", b"-1\r\n",
    b"5;a=" + b"b" * 900 + b"\r\nhello\r\n0\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: <host>\r\n\r\n" * 3, b"\x00" * 500, b"0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
)  # fmt: skip
_WHOLE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(range(160)),
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"\r\n\r\n\r\nGET /livez HTTP/1.1\r\nHost: <host>\r\n\r\n",
    b"GET /livez HTTP/1.1\nHost: <host>\n\n",
    b"GET /livez HTTP/1.0\r\n\r\n",
    b"GET /livez\r\n\r\n",
    b"GET\t/livez\tHTTP/1.1\r\nHost: <host>\r\n\r\n",
    b"GET /livez HTTP/1.1 \r\nHost: <host>\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: <host>\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"GET /livez HTTP/1.1\r\nHost: <host>\r\n\r\n" * 40,
)


def fuzzed_http(seed: int, num: int) -> Tally:
    """So many connections, in turn over TCP and the Unix socket."""
    tally = Tally()
    with attacked_service(HASTY) as service:
        remains, bystander = Remains(service), Bystander(service)
        for number in range(num):
            rng = random.Random(f"{seed} {number}")
            data = fuzzed_bytes(rng)
            with losing(tally, f"seed {seed}, connection {number}, {data[:150]!r}"):
                outcome = exchanged(service, "tcp" if number % 2 else "unix", data, is_aborted=rng.random() < 0.2)
                if number % 20 == 0:
                    bystander.ask()
                tally.survive(outcome)
        conclude(tally, remains, bystander)
    return tally


def fuzzed_bytes(rng: random.Random) -> bytes:
    data = (
        rng.choice(_WHOLE)
        if rng.random() < 0.1
        else b"".join(_request(rng) for _ in range(rng.choice((1, 1, 1, 2, 5))))
    )
    if rng.random() < 0.3:
        data = rng.choice(_SPOILED)(rng, data)
    return data


def _request(rng: random.Random) -> bytes:
    method = rng.choice(_METHODS[:3]) if rng.random() < 0.7 else rng.choice(_METHODS)
    path = rng.choice(_PATHS[:10]) if rng.random() < 0.6 else rng.choice(_PATHS)
    version = (
        b"HTTP/1.1"
        if rng.random() < 0.9
        else rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.11", b"http/1.1"))
    )
    headers = [b"Host: <host>"] if rng.random() < 0.9 else []
    body = rng.choice(_BODIES)
    if rng.random() < 0.5:
        headers += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    headers += rng.choices(_HEADERS, k=rng.choice((0, 1, 1, 2, 4)))
    rng.shuffle(headers)
    return b"%b %b %b\r\n%b\r\n\r\n%b" % (method, path, version, b"\r\n".join(headers), body)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flipped(rng: random.Random, data: bytes) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.choice((1, 2, 20))):
        flipped[rng.randrange(len(flipped))] = rng.choice((0, 10, 13, 32, 58, 255, rng.randrange(256)))
    return bytes(flipped)


def _doubled(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 10, 200)))
    return data[:end] + data[start:end] * rng.choice((1, 3, 300)) + data[end:]


_SPOILED: tuple[Callable[[random.Random, bytes], bytes], ...] = (_cut, _flipped, _doubled)


def exchanged(service: ApiService, over: str, data: bytes, *, is_aborted: bool) -> str:
    """How it ended: the first status, or that there was none. Raises AssertionError for an answer that is none, and for
    a mistake of the server's.
    """
    host = service.url.removeprefix("http://")
    with _connected(service, over) as sock:
        sock.settimeout(30)
        try:
            sock.sendall(data.replace(b"<host>", host.encode()))
            if is_aborted:
                return "hung up"
            if len(data) % 2:
                sock.shutdown(socket.SHUT_WR)
            received = _received(sock)
        except ConnectionError:
            return "ended"
    return check_answers(received)


def check_answers(received: bytes) -> str:
    """The first status. Raises AssertionError unless these are answers, none of them with a status of 500."""
    if not received:
        return "ended"
    statuses = [int(found) for found in _STATUS.findall(received)]
    assert received.startswith(b"HTTP/1.1 "), f"no answer: {received[:100]!r}"
    assert 500 not in statuses, f"a mistake: {received[:500]!r}"
    if statuses[-1] >= 400 and b"application/problem+json" not in received:
        raise AssertionError(f"no problem: {received[:300]!r}")
    return str(statuses[0])


def _received(sock: socket.socket) -> bytes:
    """What comes until the server ends the connection, or waits for another request for some time."""
    parts: list[bytes] = []
    sock.settimeout(0.02)
    try:
        while part := sock.recv(1 << 16):
            parts.append(part)
            if len(parts) > 200:
                break
    except TimeoutError:
        pass
    return b"".join(parts)


def _connected(service: ApiService, over: str) -> socket.socket:
    if over == "tcp":
        name, port = service.url.removeprefix("http://").split(":")
        return socket.create_connection((name, int(port)))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(service.run_directory.api_socket))
    return sock
