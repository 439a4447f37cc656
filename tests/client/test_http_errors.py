"""What both clients say when there is no server, or something else in its place."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvpage.client.http import Client
from kvpage.client.problem import error_of
from kvpage.errors import (
    CannotUnify,
    Conflict,
    DeviceUnavailable,
    FieldError,
    InternalError,
    PermissionDenied,
    PoolNotFound,
    ProtocolError,
    SpecInvalid,
    TooLarge,
)
from support.blocking_client import BOTH_CLIENTS
from support.plan_requests import small_request

pytestmark = pytest.mark.usefixtures("no_leaks")

POOL = {
    "id": "pool-1", "name": "mimo", "device": "host", "state": "ready", "plan_id": "sha256:00", "epoch": "00",
    "buffer_size_bytes": 1, "committed_bytes": 1, "num_holders": 0, "holders": [],
}  # fmt: skip


@pytest.fixture(params=BOTH_CLIENTS, ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Client]:
    found: type[Client] = request.param
    return found


@contextmanager
def answering(kind: type[Client], *answers: httpx.Response) -> Iterator[tuple[Client, list[httpx.Request]]]:
    """A client whose requests are recorded and answered in turn."""
    requests: list[httpx.Request] = []
    waiting = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return waiting.pop(0)

    with kind("http://test", transport=httpx.MockTransport(answer)) as client:
        yield client, requests
    assert not waiting


@contextmanager
def listening(path: Path, answer: bytes) -> Iterator[None]:
    """Something that reads a little from its one caller, sends `answer` and hangs up."""

    def serve() -> None:
        received = b""
        while not received:  # a client's first connection may only ask whether anybody listens
            sock, _ = listener.accept()
            with sock:
                received = sock.recv(1 << 16)
                if received:
                    sock.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


# --- no server --------------------------------------------------------------------------------------------------------


def test_without_a_server_the_error_says_how_to_start_one(run_dir: Path, kind: type[Client]) -> None:
    with kind(run_dir=str(run_dir)) as client:
        for _ in range(2):
            with pytest.raises(DeviceUnavailable, match="kvpage serve") as raised:
                client.plan(small_request())
            assert raised.value.details["address"] == str(run_dir / "kvpage.sock")


def test_a_stale_socket_is_like_none(run_dir: Path, kind: type[Client]) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "kvpage.sock"))
    with kind(run_dir=str(run_dir)) as client, pytest.raises(DeviceUnavailable, match="kvpage serve"):
        client.pools()


def test_without_a_server_at_a_url_the_error_names_it(kind: type[Client]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with kind(url) as client, pytest.raises(DeviceUnavailable, match=url):
        client.pools()


def test_a_server_that_hangs_up_is_reported(run_dir: Path, kind: type[Client]) -> None:
    with listening(run_dir / "kvpage.sock", b""), kind(run_dir=str(run_dir)) as client:
        with pytest.raises(DeviceUnavailable, match="ended the connection"):
            client.pools()


def test_a_server_that_does_not_speak_http_is_reported(run_dir: Path, kind: type[Client]) -> None:
    with listening(run_dir / "kvpage.sock", b"SSH-2.0-OpenSSH\r\n"), kind(run_dir=str(run_dir)) as client:
        with pytest.raises(DeviceUnavailable):
            client.pools()


def test_a_server_that_does_not_answer_is_given_up(run_dir: Path, kind: type[Client]) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(run_dir / "kvpage.sock"))
        silent.listen()
        with kind(run_dir=str(run_dir), timeout_s=0.05) as client:
            with pytest.raises(DeviceUnavailable, match=r"within 0\.05 s"):
                client.pools()


def test_too_long_a_socket_path_is_refused_before_anything_is_sent(run_dir: Path, kind: type[Client]) -> None:
    with pytest.raises(TooLarge, match="107"):
        kind(run_dir=str(run_dir / ("d" * 100)))


FORBIDDEN = """
import asyncio, os, sys
from kvpage import AsyncClient, Client
from kvpage.errors import PermissionDenied
import anyio._backends._asyncio, httpcore._backends.anyio, httpcore._backends.sync
import encodings.idna, httpx._decoders, http.cookiejar
name, folder = sys.argv[1:]
async def ask():
    await AsyncClient(run_dir=folder).pools()
client = Client(run_dir=folder)
os.setresuid(65534, 65534, 65534)
try:
    client.pools() if name == "sync" else asyncio.run(ask())
except PermissionDenied:
    print("denied")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_user_who_may_not_connect_is_told_so(run_dir: Path, name: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "kvpage.sock"))
        listener.listen()
        done = subprocess.run(
            [sys.executable, "-c", FORBIDDEN, name, str(run_dir)], capture_output=True, text=True, check=False
        )
    assert done.stdout == "denied\n", done.stderr


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"<html>Bad gateway</html>", b"\xff", b"{}", b'{"code": 7, "detail": "x"}', b"[]"]
)
def test_an_answer_of_something_else_is_a_protocol_error(body: bytes) -> None:
    error = error_of(502, body)
    assert type(error) is ProtocolError
    assert "502" in error.message


def test_a_problem_becomes_its_error_with_everything_in_it() -> None:
    body = (
        b'{"type": "/errors#x", "code": "cannot-unify-page-size", "detail": "no", "status": 422, "future": 1,'
        b' "errors": [{"pointer": "/layers/0", "detail": "this"}], "details": {"page_size_bytes": 3}}'
    )
    error = error_of(422, body)
    assert type(error) is CannotUnify
    assert error.errors == (FieldError("/layers/0", "this"),)
    assert error.details == {"page_size_bytes": 3}


def test_a_code_of_a_later_version_is_kept_in_the_text() -> None:
    error = error_of(418, b'{"code": "teapot", "detail": "short and stout"}')
    assert isinstance(error, InternalError)
    assert "teapot" in error.message
    assert "short and stout" in error.message


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"pools": [{}]}', b'{"pools": 1}', b"\xff"])
def test_an_answer_that_is_not_what_was_asked_for_is_a_protocol_error(answer: bytes, kind: type[Client]) -> None:
    with answering(kind, httpx.Response(200, content=answer)) as (client, _), pytest.raises(ProtocolError):
        client.pools()


def test_fields_of_a_later_version_are_ignored(kind: type[Client]) -> None:
    with answering(kind, httpx.Response(200, json={"pools": [{**POOL, "colour": "red"}], "next": None})) as (client, _):
        assert client.pools()[0].name == "mimo"


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_creation_that_takes_longer_is_waited_for(kind: type[Client]) -> None:
    creating = {**POOL, "state": "creating"}
    answers = [httpx.Response(202, json=creating), httpx.Response(200, json=creating), httpx.Response(200, json=POOL)]
    with answering(kind, *answers) as (client, requests):
        pool = client.create_pool(small_request(), name="mimo", wait_s=3600)
    assert pool.state == "ready"
    assert [request.url.raw_path for request in requests][1:] == [b"/v1/pools/pool-1?wait=30.000"] * 2
    assert requests[0].headers["prefer"] == "wait=30"


def test_a_deletion_that_may_take_longer_is_asked_for_again(kind: type[Client]) -> None:
    held = httpx.Response(409, json={"code": "conflict", "detail": "held", "details": {"holders": [{"pid": 7}]}})
    with answering(kind, held, held, httpx.Response(204)) as (client, requests):
        client.delete_pool("pool-1", wait_s=3600)
    assert [request.url.raw_path for request in requests] == [b"/v1/pools/pool-1?wait=30.000"] * 3
    with answering(kind, held) as (client, requests), pytest.raises(Conflict) as raised:
        client.delete_pool("pool-1")
    assert raised.value.details["holders"] == [{"pid": 7}]
    assert requests[0].url.raw_path == b"/v1/pools/pool-1"


def test_without_time_left_a_creation_is_returned_as_it_is(kind: type[Client]) -> None:
    with answering(kind, httpx.Response(202, json={**POOL, "state": "creating"})) as (client, requests):
        assert client.create_pool(small_request(), name="mimo", wait_s=0).state == "creating"
    assert requests[0].headers["prefer"] == "wait=0"


def test_a_creation_that_fails_while_it_is_waited_for_is_its_error(kind: type[Client]) -> None:
    failed = {**POOL, "state": "failed", "error": {"code": "not-enough-memory", "message": "gone", "details": {"a": 1}}}
    answers = [httpx.Response(202, json={**POOL, "state": "creating"}), httpx.Response(200, json=failed)]
    with answering(kind, *answers) as (client, _), pytest.raises(Exception, match="gone") as raised:
        client.create_pool(small_request(), name="mimo")
    assert getattr(raised.value, "code", None) == "not-enough-memory"


def test_a_name_on_two_devices_needs_a_device(kind: type[Client]) -> None:
    both = {"pools": [POOL, {**POOL, "device": "cuda:0"}]}
    with answering(kind, httpx.Response(200, json=both)) as (client, _), pytest.raises(Conflict) as raised:
        client.find_pool("mimo")
    assert raised.value.details == {"devices": ["host", "cuda:0"]}
    with answering(kind, httpx.Response(200, json={"pools": []})) as (client, requests), pytest.raises(PoolNotFound):
        client.find_pool("mimo & co", "cuda:0")
    assert dict(requests[0].url.params) == {"name": "mimo & co", "device": "cuda:0"}


def test_a_token_is_sent_and_never_shown(kind: type[Client]) -> None:
    with kind("http://test", token="secret-token", transport=httpx.MockTransport(lambda request: httpx.Response(
        200, json={"pools": []} if request.headers["authorization"] == "Bearer secret-token" else None
    ))) as client:  # fmt: skip
        assert client.pools() == []
        assert "secret" not in repr(client)


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, kind: type[Client]) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with answering(kind, httpx.Response(200, json={"pools": []})) as (client, _):
        assert client.pools() == []
    with kind("http://127.0.0.1:1") as direct, pytest.raises(DeviceUnavailable, match=r"http://127\.0\.0\.1:1"):
        direct.pools()


def test_permission_is_denied_by_its_code(kind: type[Client]) -> None:
    problem = {"code": "permission-denied", "detail": "no"}
    with answering(kind, httpx.Response(403, json=problem)) as (client, _), pytest.raises(PermissionDenied):
        client.pools()


@pytest.mark.parametrize("url", ["127.0.0.1:8411", "localhost", "foo://x", ""])
def test_a_url_names_its_scheme(url: str) -> None:
    with pytest.raises(SpecInvalid, match="http://"):
        Client(url)


def test_who_named_a_url_is_not_sent_to_a_folder() -> None:
    with Client("https://localhost:1") as client, pytest.raises(DeviceUnavailable) as absent:
        client.devices()
    assert "--url" in absent.value.message
    assert "--run-dir" not in absent.value.message
