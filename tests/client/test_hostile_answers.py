"""Whatever answers in place of a kvpage server, both clients end it with an error of kvpage's that says what came."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kvpage.client import calls
from kvpage.client.http import Client
from kvpage.client.problem import MAX_DETAIL_CHARS
from kvpage.errors import InternalError, KvpageError, ProtocolError
from support.blocking_client import BOTH_CLIENTS

pytestmark = pytest.mark.usefixtures("no_leaks")

DEEP = b'{"a":' * 100_000
PROBLEM = b'{"code": "internal", "detail": "x", "details": {"a": %s}}'
HOSTILE = {
    "nothing": b"",
    "null": b"null",
    "a number": b"7",
    "an array": b"[]",
    "a page": b"<html>Bad gateway</html>",
    "not UTF-8": b"\xff\xfe",
    "deep": DEEP,
    "deep inside": b'{"code":"internal","detail":"x","pools":[],"devices":' + DEEP,
    "deep in what is kept": PROBLEM % DEEP,
    "cut off": b'{"pools": [',
    "a huge integer": b'{"pools": %s, "devices": 1, "code": 2}' % (b"9" * 100_000),
    "half a surrogate pair": rb'{"code": "\ud800", "detail": "\udc00", "pools": "\ud800"}',
    "wrong types": b'{"code": 5, "detail": [], "pools": {}, "devices": 3}',
    "a key twice": b'{"pools": 1, "pools": 2}',
}


@pytest.fixture(params=BOTH_CLIENTS, ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Client]:
    found: type[Client] = request.param
    return found


def answered_by(kind: type[Client], status: int, content: bytes, **headers: str) -> Client:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=content, headers=headers)

    return kind("http://test", transport=httpx.MockTransport(answer))


ASK: dict[str, Callable[[Client], Any]] = {
    "plan": lambda client: client.plan({}),
    "get_plan": lambda client: client.get_plan("sha256:00"),
    "layout_svg": lambda client: client.layout_svg("sha256:00"),
    "create_pool": lambda client: client.create_pool({}, name="mimo"),
    "pools": lambda client: client.pools(),
    "get_pool": lambda client: client.get_pool("pool-1"),
    "find_pool": lambda client: client.find_pool("mimo"),
    "pool_tensors": lambda client: client.pool_tensors("pool-1"),
    "devices": lambda client: client.devices(),
    "health": lambda client: client.health(),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("status", [200, 302, 500])
def test_hostile_content_is_an_error_of_ours(kind: type[Client], status: int, content: bytes) -> None:
    with answered_by(kind, status, content) as client:
        for name, ask in ASK.items():
            with pytest.raises(ProtocolError) as raised:
                ask(client)
            assert len(raised.value.message) < 1000, name
            assert str(status) in raised.value.message or "begins with" in raised.value.message


@pytest.mark.parametrize("literal", [b"9" * 10_000, b"1e999", b"-1e999"], ids=["long", "infinite", "below"])
def test_numbers_that_do_not_fit_into_details(kind: type[Client], literal: bytes) -> None:
    with answered_by(kind, 500, PROBLEM % literal) as client, pytest.raises(KvpageError) as raised:
        client.pools()
    assert type(raised.value) in (ProtocolError, InternalError)


def test_a_deletion_is_done_when_the_server_says_so_and_not_when_it_points_elsewhere(kind: type[Client]) -> None:
    with answered_by(kind, 302, b"", location="http://elsewhere") as client:
        with pytest.raises(ProtocolError, match="302"):
            client.delete_pool("pool-1")


def test_the_message_of_a_problem_is_bounded(kind: type[Client]) -> None:
    body = b'{"code": "internal", "detail": "%s"}' % (b"x" * 1_000_000)
    with answered_by(kind, 500, body) as client, pytest.raises(InternalError) as raised:
        client.pools()
    assert len(raised.value.message) == MAX_DETAIL_CHARS


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Counts what was read of it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def _next(self) -> bytes:
        self.num_bytes += 1 << 20
        return b" " * (1 << 20)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self._next()

    async def __aiter__(self) -> Any:
        while True:
            yield self._next()


def test_no_more_is_read_than_any_answer_has(kind: type[Client]) -> None:
    endless = Endless()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=endless))
    with kind("http://test", transport=transport) as client, pytest.raises(ProtocolError, match=r"more than \d+ bytes"):
        client.pools()
    assert calls.MAX_ANSWER_BYTES < endless.num_bytes < calls.MAX_ANSWER_BYTES + (2 << 20)


def test_a_small_answer_that_becomes_large_is_not_kept(kind: type[Client]) -> None:
    bomb = gzip.compress(bytes(calls.MAX_ANSWER_BYTES + 1))
    with answered_by(kind, 200, bomb, **{"content-encoding": "gzip"}) as client:
        with pytest.raises(ProtocolError, match="more than"):
            client.pools()


def test_an_answer_that_is_not_compressed_as_it_says(kind: type[Client]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=httpx.ByteStream(b"plain"), headers={"content-encoding": "gzip"})

    with kind("http://test", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(ProtocolError, match="compressed"):
            client.pools()
