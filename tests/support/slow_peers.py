"""Clients that send byte by byte, never finish, never say anything, or never read: to the server, and to a worker."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpage.wire import messages
from kvpage.wire.channel import header
from kvpage.wire.client import WorkerClient
from kvpage.wire.messages import Hello, ListPools, RequestFrame
from kvpage_server.worker_limits import Limits
from support.api_service import ApiService
from support.attacked_service import Bystander, Remains, attacked_service, conclude, losing
from support.eventually import TIMEOUT_S
from support.plan_requests import wide_request
from support.pools import create_pool
from support.tally import Tally
from support.worker_thread import WorkerThread

HASTY = {"head_s": 0.5, "body_s": 0.5, "unread_s": 0.5, "linger_s": 0.3}
WORKER_HASTY = Limits(hello_s=0.5, stall_s=0.5, frame_s=0.5)
_GET = b"GET /livez HTTP/1.1\r\nHost: <host>\r\n"
_POST = b"POST /v1/plans HTTP/1.1\r\nHost: <host>\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a client is slow: what it sends at once, and then piece by piece without end."""

    name: str
    first: bytes
    pieces: bytes = b""
    reads: bool = True


HTTP_KINDS = (
    Kind("says nothing", b""),
    Kind("a head, byte by byte", b"", b"a"),
    Kind("headers without end", _GET, b"x: a\r\n"),
    Kind("empty lines", b"", b"\r\n"),
    Kind("half a head", _GET),
    Kind("a body, byte by byte", _POST + b"Content-Length: 100000\r\n\r\n", b" "),
    Kind("a body that never begins", _POST + b"Content-Length: 100000\r\n\r\n"),
    Kind("chunks, byte by byte", _POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    Kind("trailers without end", _POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"x: a\r\n"),
    Kind("a second request, byte by byte", _GET + b"\r\n" + _GET, b"a"),
    Kind("never reads", b"<answers>", reads=False),
)


def slow_http_clients(num_each: int, limits: Mapping[str, float] = HASTY, patience_s: float = TIMEOUT_S) -> Tally:
    """So many of each kind over each kind of connection. Each must be closed by its bound; somebody else is answered
    all the time.
    """
    tally = Tally()
    with attacked_service(limits) as service:
        remains, bystander = Remains(service), Bystander(service)
        answers = _many_large_answers(service)
        with contextlib.ExitStack() as stack:
            kinds = [(over, kind) for over in ("unix", "tcp") for kind in HTTP_KINDS]
            slow = [
                stack.enter_context(_slow(service, over, kind, answers))
                for over, kind in kinds
                for _ in range(num_each)
            ]
            _drip(slow, bystander, tally, patience_s)
            conclude(tally, remains, bystander, patience_s)  # waits until the server has no descriptor of them
            for client in slow:
                _count(client, tally)
    tally.outcomes["requests of others answered meanwhile"] = bystander.num_answers
    return tally


def _count(client: Slow, tally: Tally) -> None:
    if client.ends():
        tally.survive("closed")
    else:
        tally.lose(f"{client.name} is not closed")


def _many_large_answers(service: ApiService) -> bytes:
    with service.client() as client:
        plan_id = client.plan(wide_request(4000)).plan_id
    return f"GET /v1/plans/{plan_id} HTTP/1.1\r\nHost: <host>\r\n\r\n".encode() * 16


class Slow:
    """One such client. Not blocking."""

    def __init__(self, sock: socket.socket, name: str, first: bytes, pieces: bytes, *, reads: bool) -> None:
        self.name = name
        self._socket = sock
        self.reads = reads
        self._left = first
        self._pieces = itertools.cycle(bytes([byte]) for byte in pieces) if pieces else iter(())
        self.is_open = True
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def drip(self) -> None:
        """Send a little more, if the other end takes it."""
        if not self._left:
            self._left = next(self._pieces, b"")
        try:
            if self._left:
                self._left = self._left[self._socket.send(self._left) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def look(self) -> None:
        """Read what came, if this one reads, and see whether the other end has closed."""
        if self.reads:
            self._receive()

    def ends(self) -> bool:
        """Whether there is an end behind what is still to be read. A TCP connection tells it no sooner."""
        self._socket.setblocking(True)
        self._socket.settimeout(1)
        while self.is_open:
            try:
                self._receive()
            except TimeoutError:
                return False
        return True

    def _receive(self) -> None:
        try:
            self.is_open = bool(self._socket.recv(1 << 16))
        except BlockingIOError:
            pass
        except ConnectionError:
            self.is_open = False

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _slow(service: ApiService, over: str, kind: Kind, answers: bytes) -> Slow:
    host = service.url.removeprefix("http://")
    if over == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(service.run_directory.api_socket))
    else:
        name, port = host.split(":")
        sock = socket.create_connection((name, int(port)))
    first = kind.first.replace(b"<answers>", answers).replace(b"<host>", host.encode())
    return Slow(sock, f"{kind.name} over {over}", first, kind.pieces, reads=kind.reads)


def _drip(slow: Sequence[Slow], bystander: Bystander, tally: Tally, patience_s: float) -> None:
    """Until all are closed. Whatever the machine is at, somebody else must be answered between any two bytes."""
    deadline_s = time.monotonic() + patience_s
    while any(client.is_open and client.reads for client in slow) and time.monotonic() < deadline_s:
        for client in slow:
            if client.is_open:
                client.drip()
                client.look()
        before = tally.lost
        with losing(tally, "somebody else"):
            bystander.ask()
        if tally.lost > before:
            return


# --- a worker ---------------------------------------------------------------------------------------------------------


def _frame(body: messages.RequestBody, request_id: int) -> bytes:
    payload = messages.encode(RequestFrame(id=request_id, body=body))
    return header(len(payload), 0) + payload


_HELLO = _frame(Hello(version=messages.PROTOCOL_VERSION, role="client", client_name="slow"), 1)
_LIST = _frame(ListPools(), 2)
_LONG = header(1 << 20, 0)
WORKER_KINDS = (
    Kind("says nothing", b""),
    Kind("a hello, byte by byte", b"", _LONG[:1]),
    Kind("half a hello", _HELLO[:-1]),
    Kind("half a header", _HELLO + _LIST[:3]),
    Kind("half a request", _HELLO + _LIST[:-1]),
    Kind("a long request, byte by byte", _HELLO + _LONG, b"{"),
    Kind("never reads", _HELLO + _LIST * 20_000, reads=False),
    Kind("descriptors without a request", b"<descriptors>"),
)


def slow_worker_clients(
    run_dir: Path, num_each: int, limits: Limits = WORKER_HASTY, patience_s: float = TIMEOUT_S
) -> Tally:
    """The same for the worker's socket, whose clients also send descriptors and nothing with them."""
    tally = Tally()
    with WorkerThread(run_dir, limits=limits) as worker, worker.client() as good, contextlib.ExitStack() as stack:
        for number in range(20):
            create_pool(good, f"{number}" + "n" * 250, size_bytes=4096)
        slow = [
            stack.enter_context(_slow_at(worker.socket_path, kind)) for kind in WORKER_KINDS for _ in range(num_each)
        ]
        num_answers, deadline_s = 0, time.monotonic() + patience_s
        while num_others(good) and time.monotonic() < deadline_s:
            for client in slow:
                if client.is_open:
                    client.drip()
                    client.look()
            assert len(good.ask(ListPools(), messages.PoolList).pools) == 20
            num_answers += 1
        for client in slow:
            _count(client, tally)
        if num_others(good):
            tally.lose(f"the worker has {num_others(good)} clients that are closed")
    tally.outcomes["requests of others answered meanwhile"] = num_answers
    return tally


def num_others(client: WorkerClient) -> int:
    return client.ask(messages.DescribeDevice(), messages.DeviceState).num_clients - 1


def _slow_at(path: Path, kind: Kind) -> Slow:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    first = kind.first
    if first == b"<descriptors>":
        with _null() as fd:
            socket.send_fds(sock, [_HELLO + _LIST[:1]], [fd] * 4)
        first = b""
    return Slow(sock, f"{kind.name} at the worker", first, kind.pieces, reads=kind.reads)


@contextlib.contextmanager
def _null() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)
