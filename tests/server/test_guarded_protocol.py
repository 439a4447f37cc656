"""What no connection may do: be anything but HTTP, send without end, take its time, pile things up, or never read."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvpage_server.intake import IntakeLimits
from support import tight_server
from support.api_service import ApiService
from support.eventually import until
from support.leaks import leak_guard
from support.plan_requests import small_request, wide_request
from support.problems import assert_problem
from support.raw_http import RawHttp

LIMITS = IntakeLimits()
BODY = json.dumps(small_request()).encode()
GET = b"GET /livez HTTP/1.1\r\nHost: <host>\r\n\r\n"
EVENTS = GET.replace(b"/livez", b"/v1/events")
POST = b"POST /v1/plans HTTP/1.1\r\nHost: <host>\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNKED_BODY = CHUNKED + b"%x\r\n%b\r\n" % (len(BODY), BODY)

# As small as tests need them; each is reached by one of them.
NARROW = {"max_connections": 4, "small_body_bytes": 1000, "max_large_bodies_bytes": 3000, "linger_s": 60}
HASTY = {"head_s": 0.3, "body_s": 0.3, "unread_s": 0.3}
over = pytest.mark.parametrize("over", ["unix", "tcp"])


@contextlib.contextmanager
def tight_service(limits: Mapping[str, float]) -> Iterator[ApiService]:
    command = [sys.executable, tight_server.__file__, json.dumps(limits)]
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--port", "0", "--memory", "64MiB", command=command) as service:
            yield service


@pytest.fixture(scope="module")
def hasty() -> Iterator[ApiService]:
    with leak_guard(), tight_service(HASTY) as service:
        yield service


@pytest.fixture(scope="module")
def narrow() -> Iterator[ApiService]:
    with leak_guard(), tight_service(NARROW) as service:
        yield service


# --- how much of one request ------------------------------------------------------------------------------------------


@over
@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(CHUNKED_BODY + b"0\r\n" + b"x: a\r\n" * 100_000, id="many trailers"),
        pytest.param(CHUNKED_BODY + b"0\r\nx: " + b"a" * (1 << 20), id="a long trailer"),
        pytest.param(CHUNKED_BODY + b"5;" + b"a" * (1 << 20), id="a long chunk extension"),
        pytest.param(b"GET /" + b"a" * (1 << 20), id="a long path"),
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 20), id="a long header"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 100_000, id="many headers"),
        pytest.param(b"\r\n" * 100_000, id="empty lines"),
        pytest.param(CHUNKED + b"%x\r\n" % (5 << 20) + b" " * (5 << 20), id="a long chunk"),
        pytest.param(CHUNKED + b"10000\r\n%b\r\n" % (b" " * 0x10000) * 100, id="many chunks"),
        pytest.param(POST + b"Content-Length: %d\r\n\r\n" % (LIMITS.max_body_bytes + 1), id="a declared length"),
    ],
)
def test_what_does_not_end_is_refused(shared_service: ApiService, endless: bytes, over: str) -> None:
    with RawHttp(shared_service, over) as client:
        client.send(endless)
        body = assert_problem(client.answer(), "too-large")
        assert body["details"]["limit_bytes"] in (LIMITS.max_head_bytes, LIMITS.max_body_bytes)
        assert client.is_closed()


@over
def test_a_head_may_have_just_so_many_bytes(shared_service: ApiService, over: str) -> None:
    """In one piece, which the parser would take whole."""
    with RawHttp(shared_service, over) as client:
        host = shared_service.url.removeprefix("http://").encode()
        start, end = b"GET /livez HTTP/1.1\r\nHost: %b\r\nx: " % host, b"\r\n\r\n"
        padding = b"a" * (LIMITS.max_head_bytes - len(start + end))
        client.send(start + padding + end)
        assert client.answer().status_code == 200
        client.send(start + padding + b"a" + end)
        assert_problem(client.answer(), "too-large")


def test_a_body_in_the_smallest_chunks_is_read(shared_service: ApiService) -> None:
    """Its framing is larger than a head may be, but never between two pieces."""
    chunks = b"".join(b"1;%b\r\n%c\r\n" % (b"x" * 200, byte) for byte in BODY)
    with RawHttp(shared_service) as client:
        client.send(CHUNKED + chunks + b"0\r\nx-trailer: a\r\n\r\n" + GET)
        assert client.answer().status_code in (200, 201)
        assert client.answer().status_code == 200


def test_trailers_change_nothing(shared_service: ApiService) -> None:
    with RawHttp(shared_service) as client:
        client.send(CHUNKED_BODY + b"0\r\nContent-Encoding: gzip\r\nAccept-Encoding: gzip\r\nHost: evil\r\n\r\n")
        response = client.answer()
        assert response.status_code in (200, 201)
        assert "content-encoding" not in response.headers


def test_a_refusal_repeats_the_request_id(shared_service: ApiService) -> None:
    for rest in (b"x: " + b"a" * (1 << 20), b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"):
        with RawHttp(shared_service) as client:
            client.send(POST + b"X-Request-ID: mine\r\n" + rest)
            assert client.answer().headers["x-request-id"] == "mine"


@pytest.mark.parametrize("wait", [b"", POST + b"Content-Length: 100\r\n\r\n{"], ids=["idle", "in a body"])
def test_requests_piled_up_on_one_connection_end_it(shared_service: ApiService, wait: bytes) -> None:
    with RawHttp(shared_service) as client:
        client.send(wait + GET * 10_000)
        with pytest.raises(EOFError):
            for _ in range(10_000):
                client.answer()
    with RawHttp(shared_service) as client:
        client.send(GET * LIMITS.max_pipelined)
        assert [client.answer().status_code for _ in range(LIMITS.max_pipelined)] == [200] * LIMITS.max_pipelined


# --- what is not HTTP -------------------------------------------------------------------------------------------------


@over
@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /livez HTTP/9.9\r\n\r\n",
        b"get /livez HTTP/1.1\r\n\r\n",
        b"GET livez HTTP/1.1\r\n\r\n",
        b"GET http:/// HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: \x00\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: gzip\r\n\r\n",
        POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n",
        CHUNKED_BODY + b"0\r\nContent-Length: 3\r\n\r\n",
    ],
)
def test_it_is_refused_as_a_problem(shared_service: ApiService, request_: bytes, over: str) -> None:
    with RawHttp(shared_service, over) as client:
        client.send(request_)
        assert_problem(client.answer(), "http-invalid")
        assert client.is_closed()


def test_after_an_answer_the_next_request_may_still_be_refused(shared_service: ApiService) -> None:
    with RawHttp(shared_service) as client:
        client.send(GET)
        assert client.answer().status_code == 200
        client.send(b"nonsense\r\n")
        assert_problem(client.answer(), "http-invalid")


def test_a_refused_client_reads_why_though_it_goes_on_sending(shared_service: ApiService) -> None:
    """Closing a socket with unread bytes would destroy what was sent to the other end."""
    with RawHttp(shared_service) as client:
        client.send(POST + b"Content-Length: %d\r\n\r\n" % (100 << 20))
        client.send(b" " * (8 << 20))
        assert_problem(client.answer(), "too-large")


@over
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(GET[:-2] + b"<upgrade>", id="without a body"),
        pytest.param(POST + b"<upgrade>Content-Length: %d\r\n\r\n" % len(BODY) + BODY, id="with a body"),
        pytest.param(CHUNKED_BODY.replace(b"Transfer", b"<upgrade>Transfer") + b"0\r\n\r\n", id="in chunks"),
    ],
)
def test_a_request_for_another_protocol_is_answered_in_this_one(
    shared_service: ApiService, over: str, protocol: bytes, request_: bytes
) -> None:
    """Clients that would rather have HTTP/2 send it first. Its body, and what they send next, is read as usual."""
    upgrade = b"Connection: Upgrade\r\nUpgrade: %b\r\n" % protocol + b"\r\n" * request_.startswith(b"GET")
    request = request_.replace(b"<upgrade>", upgrade)
    with RawHttp(shared_service, over) as client:
        client.send(request + GET)
        assert client.answer().status_code in (200, 201)
        assert client.answer().json() == {"status": "ok"}
        for start in range(0, len(request), 50):
            client.send(request[start : start + 50])
        assert client.answer().status_code == 200
        client.send(GET)
        assert client.answer().json() == {"status": "ok"}


# --- how long ---------------------------------------------------------------------------------------------------------


@over
@pytest.mark.parametrize(
    ("unfinished", "what"),
    [
        (b"G", "head"),
        (b"GET /livez HTTP/1.1\r\nHost: <ho", "head"),
        (b"\r\n", "head"),
        (POST + b"Content-Length: 100\r\n\r\n", "body"),
        (POST + b"Content-Length: 100\r\n\r\n{", "body"),
        (CHUNKED, "body"),
        (CHUNKED_BODY + b"0\r\nx: ", "body"),
    ],
)
def test_a_request_that_does_not_come_whole_is_given_up(
    hasty: ApiService, unfinished: bytes, what: str, over: str
) -> None:
    with RawHttp(hasty, over) as client:
        client.send(unfinished)
        assert what in assert_problem(client.answer(), "request-timeout")["detail"]
        assert client.is_closed()
    with RawHttp(hasty, over) as client:  # a second request is timed like the first
        client.send(GET)
        assert client.answer().status_code == 200
        client.send(unfinished)
        assert what in assert_problem(client.answer(), "request-timeout")["detail"]


@over
def test_a_connection_that_says_nothing_is_closed(hasty: ApiService, over: str) -> None:
    with RawHttp(hasty, over) as client:
        assert client.is_closed()


def test_the_rest_of_a_body_is_waited_for_no_longer_when_it_is_answered(hasty: ApiService) -> None:
    with RawHttp(hasty) as client:
        client.send(GET[:-2] + b"Content-Length: 100\r\n\r\n{")
        assert client.answer().status_code == 200
        assert client.is_closed()


@over
def test_a_client_that_reads_nothing_is_dropped(no_leaks: None, over: str) -> None:
    with tight_service(HASTY) as service:
        idle_fds = service.num_fds()
        with service.client() as planner:
            large_plan = f"/v1/plans/{planner.plan(wide_request(4000)).plan_id}"
        with RawHttp(service, over) as client:
            client.send(GET.replace(b"/livez", large_plan.encode()) * 16)  # far more than sockets hold
            assert client.socket.recv(12) == b"HTTP/1.1 200"
            assert until(lambda: service.num_fds() <= idle_fds)


def test_a_server_that_ends_waits_for_no_body(service: ApiService) -> None:
    with RawHttp(service) as client:
        client.send(POST + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
        assert client.answer().status_code == 100
        service.ask_to_end()
        assert_problem(client.answer(), "draining")


# --- how many ---------------------------------------------------------------------------------------------------------


def test_a_connection_that_nothing_is_done_for_gives_way_to_a_new_one(narrow: ApiService) -> None:
    """The one that has waited longest: who keeps all connections open keeps nobody out."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(RawHttp(narrow)) for _ in range(4)]
        for client in held:
            client.send(GET)
            assert client.answer().status_code == 200
        held[0].send(GET)
        assert held[0].answer().status_code == 200  # so that the second has waited longest
        held[2].send(POST + b"Content-Length: 100\r\n\r\n{")
        for client, code in ((held[1], ""), (held[3], ""), (held[0], ""), (held[2], "too-many-clients")):
            newcomer = stack.enter_context(RawHttp(narrow))
            newcomer.send(GET)
            assert newcomer.answer().status_code == 200
            if code:
                assert_problem(client.answer(), code)
            assert client.is_closed()


def test_each_kind_of_connection_has_a_share_and_keeps_the_other_open(narrow: ApiService) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            reader = stack.enter_context(RawHttp(narrow, "unix"))
            reader.send(EVENTS)
            assert reader.socket.recv(12) == b"HTTP/1.1 200"
        with RawHttp(narrow, "unix") as refused:
            body = assert_problem(refused.answer(), "too-many-clients")
            assert body["details"] == {"limit": 4}
            assert refused.is_closed()
        with RawHttp(narrow) as client:
            client.send(GET)
            assert client.answer().status_code == 200

    def served() -> bool:
        with RawHttp(narrow, "unix") as client:
            client.send(GET)
            return client.answer().status_code == 200

    assert until(served)


def test_connections_beyond_the_limit_take_no_descriptors(narrow: ApiService) -> None:
    """Though their clients do not close them."""
    idle_fds = narrow.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(RawHttp(narrow))
        assert until(lambda: narrow.num_fds() <= idle_fds + 4)


def test_large_bodies_share_a_budget_that_small_ones_do_not_need(narrow: ApiService) -> None:
    large = POST + b"Content-Length: 2800\r\n\r\n" + b" " * 2700

    def refused() -> bool:
        with RawHttp(narrow) as client:
            client.send(large + b" " * 100)
            response = client.answer()
            if response.status_code == 400:  # spaces are no JSON, but were read
                return False
            assert assert_problem(response, "rate-limited")["details"] == {"limit_bytes": 3000}
            return True

    with RawHttp(narrow) as parked:
        parked.send(large)
        assert until(refused)
        with RawHttp(narrow) as client:
            client.send(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            assert client.answer().status_code in (200, 201)
        with RawHttp(narrow, "unix") as client:
            client.send(large + b" " * 100)
            assert_problem(client.answer(), "json-invalid")
    assert until(lambda: not refused())
