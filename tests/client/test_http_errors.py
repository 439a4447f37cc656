"""What `kvpage.Client` says when there is no server, or something else in its place."""

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
    TooLarge,
)
from support.plan_requests import small_request

pytestmark = pytest.mark.usefixtures("no_leaks")

POOL = {
    "id": "pool-1", "name": "mimo", "device": "host", "state": "ready", "plan_id": "sha256:00", "epoch": "00",
    "buffer_size_bytes": 1, "committed_bytes": 1, "num_holders": 0, "holders": [],
}  # fmt: skip


@contextmanager
def answering(*answers: httpx.Response) -> Iterator[tuple[Client, list[httpx.Request]]]:
    """A client whose requests are recorded and answered in turn."""
    requests: list[httpx.Request] = []
    waiting = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return waiting.pop(0)

    with Client("http://test", transport=httpx.MockTransport(answer)) as client:
        yield client, requests
    assert not waiting


@contextmanager
def listening(path: Path, answer: bytes) -> Iterator[None]:
    """Something that reads a little from its one caller, sends `answer` and hangs up."""

    def serve() -> None:
        for _ in range(2):  # the client's first connection only asks whether anybody listens
            sock, _ = listener.accept()
            with sock:
                if sock.recv(1 << 16):
                    sock.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


# --- no server --------------------------------------------------------------------------------------------------------


def test_without_a_server_the_error_says_how_to_start_one(run_dir: Path) -> None:
    with Client(run_dir=str(run_dir)) as client:
        for _ in range(2):
            with pytest.raises(DeviceUnavailable, match="kvpage serve") as raised:
                client.plan(small_request())
            assert raised.value.details["address"] == str(run_dir / "kvpage.sock")


def test_a_stale_socket_is_like_none(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "kvpage.sock"))
    with Client(run_dir=str(run_dir)) as client, pytest.raises(DeviceUnavailable, match="kvpage serve"):
        client.pools()


def test_without_a_server_at_a_url_the_error_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with Client(url) as client, pytest.raises(DeviceUnavailable, match=url):
        client.pools()


def test_a_server_that_hangs_up_is_reported(run_dir: Path) -> None:
    with listening(run_dir / "kvpage.sock", b""), Client(run_dir=str(run_dir)) as client:
        with pytest.raises(DeviceUnavailable, match="ended the connection"):
            client.pools()


def test_a_server_that_does_not_speak_http_is_reported(run_dir: Path) -> None:
    with listening(run_dir / "kvpage.sock", b"SSH-2.0-OpenSSH\r\n"), Client(run_dir=str(run_dir)) as client:
        with pytest.raises(DeviceUnavailable):
            client.pools()


def test_a_server_that_does_not_answer_is_given_up(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(run_dir / "kvpage.sock"))
        silent.listen()
        with Client(run_dir=str(run_dir), timeout_s=0.05) as client:
            with pytest.raises(DeviceUnavailable, match=r"within 0\.05 s"):
                client.pools()


def test_too_long_a_socket_path_is_refused_before_anything_is_sent(run_dir: Path) -> None:
    with pytest.raises(TooLarge, match="107"):
        Client(run_dir=str(run_dir / ("d" * 100)))


FORBIDDEN = """
import os, sys
from kvpage.client.http import Client
from kvpage.errors import PermissionDenied
import httpcore._backends.sync, encodings.idna, httpx._decoders, http.cookiejar
client = Client(run_dir=sys.argv[1])
os.setresuid(65534, 65534, 65534)
try:
    client.pools()
except PermissionDenied:
    print("denied")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_who_may_not_connect_is_told_so(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "kvpage.sock"))
        listener.listen()
        done = subprocess.run(
            [sys.executable, "-c", FORBIDDEN, str(run_dir)], capture_output=True, text=True, check=False
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
def test_an_answer_that_is_not_what_was_asked_for_is_a_protocol_error(answer: bytes) -> None:
    with answering(httpx.Response(200, content=answer)) as (client, _), pytest.raises(ProtocolError):
        client.pools()


def test_fields_of_a_later_version_are_ignored() -> None:
    with answering(httpx.Response(200, json={"pools": [{**POOL, "colour": "red"}], "next": None})) as (client, _):
        assert client.pools()[0].name == "mimo"


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_creation_that_takes_longer_is_waited_for() -> None:
    creating = {**POOL, "state": "creating"}
    answers = [httpx.Response(202, json=creating), httpx.Response(200, json=creating), httpx.Response(200, json=POOL)]
    with answering(*answers) as (client, requests):
        pool = client.create_pool(small_request(), name="mimo", wait_s=3600)
    assert pool.state == "ready"
    assert [request.url.raw_path for request in requests][1:] == [b"/v1/pools/pool-1?wait=30.000"] * 2
    assert requests[0].headers["prefer"] == "wait=30"


def test_without_time_left_a_creation_is_returned_as_it_is() -> None:
    with answering(httpx.Response(202, json={**POOL, "state": "creating"})) as (client, requests):
        assert client.create_pool(small_request(), name="mimo", wait_s=0).state == "creating"
    assert requests[0].headers["prefer"] == "wait=0"


def test_a_creation_that_fails_while_it_is_waited_for_is_its_error() -> None:
    failed = {**POOL, "state": "failed", "error": {"code": "not-enough-memory", "message": "gone", "details": {"a": 1}}}
    answers = [httpx.Response(202, json={**POOL, "state": "creating"}), httpx.Response(200, json=failed)]
    with answering(*answers) as (client, _), pytest.raises(Exception, match="gone") as raised:
        client.create_pool(small_request(), name="mimo")
    assert getattr(raised.value, "code", None) == "not-enough-memory"


def test_a_name_on_two_devices_needs_a_device() -> None:
    both = {"pools": [POOL, {**POOL, "device": "cuda:0"}]}
    with answering(httpx.Response(200, json=both)) as (client, _), pytest.raises(Conflict) as raised:
        client.find_pool("mimo")
    assert raised.value.details == {"devices": ["host", "cuda:0"]}
    with answering(httpx.Response(200, json={"pools": []})) as (client, requests), pytest.raises(PoolNotFound):
        client.find_pool("mimo & co", "cuda:0")
    assert dict(requests[0].url.params) == {"name": "mimo & co", "device": "cuda:0"}


def test_a_token_is_sent_and_never_shown() -> None:
    with Client("http://test", token="secret-token", transport=httpx.MockTransport(lambda request: httpx.Response(
        200, json={"pools": []} if request.headers["authorization"] == "Bearer secret-token" else None
    ))) as client:  # fmt: skip
        assert client.pools() == []
        assert "secret" not in repr(client)


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with answering(httpx.Response(200, json={"pools": []})) as (client, _):
        assert client.pools() == []
    with Client("http://127.0.0.1:1") as direct, pytest.raises(DeviceUnavailable, match=r"http://127\.0\.0\.1:1"):
        direct.pools()


def test_permission_is_denied_by_its_code() -> None:
    problem = {"code": "permission-denied", "detail": "no"}
    with answering(httpx.Response(403, json=problem)) as (client, _), pytest.raises(PermissionDenied):
        client.pools()
