"""What HTTP over a Unix socket does with its sockets: one for one connection, none left when there is no listener."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kvpage.client.unix_transport import UnixTransport

pytestmark = pytest.mark.usefixtures("no_leaks")

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_TIMEOUT_S = 60


@pytest.fixture
def listener(run_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(_TIMEOUT_S)
        listener.bind(str(run_dir / "http.sock"))
        listener.listen()
        yield listener


@pytest.fixture
def client(listener: socket.socket) -> Iterator[httpx.Client]:
    with httpx.Client(
        transport=UnixTransport(listener.getsockname()), base_url="http://kvpage", timeout=_TIMEOUT_S
    ) as client:
        yield client


def _serve(listener: socket.socket, requests: int) -> socket.socket:
    connection, _ = listener.accept()
    for _ in range(requests):
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(65_536)
        connection.sendall(_ANSWER)
    return connection


def test_two_requests_are_one_connection_and_no_other_is_made_to_try(
    listener: socket.socket, client: httpx.Client
) -> None:
    """A connection made only to see whether anybody listens says nothing of the next one: who listened may be gone
    by then.
    """
    with ThreadPoolExecutor(1) as server:
        served = server.submit(_serve, listener, 2)
        assert [client.get("/").text for _ in range(2)] == ["ok", "ok"]
        served.result().close()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_connection_the_server_ended_is_made_again(listener: socket.socket, client: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as server:
        for _ in range(2):
            served = server.submit(_serve, listener, 1)
            assert client.get("/").text == "ok"
            served.result().close()


def test_no_listener_is_a_connect_error(listener: socket.socket, client: httpx.Client) -> None:
    listener.close()
    with pytest.raises(httpx.ConnectError):
        client.get("/")


def test_an_answer_that_does_not_come_is_a_timeout_and_one_cut_short_an_error(
    listener: socket.socket, client: httpx.Client
) -> None:
    with pytest.raises(httpx.TimeoutException):
        client.get("/", timeout=0.05)
    listener.accept()[0].close()  # that one
    with ThreadPoolExecutor(1) as server:
        ended = server.submit(lambda: listener.accept()[0].close())
        with pytest.raises(httpx.TransportError):
            client.get("/")
        ended.result()
