"""Methods, paths, query strings, headers and framing that nobody sends on purpose each get the right problem."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from support.api_service import ApiService
from support.plan_requests import small_request
from support.problems import assert_problem

PATHS = [
    "/v1/plans", "/v1/plans/sha256:00", "/v1/pools", "/v1/pools/pool-00", "/v1/pools/pool-00/tensors", "/v1/devices",
    "/livez", "/readyz", "/health", "/metrics", "/errors", "/openapi.json",
]  # fmt: skip
asynchronous = pytest.mark.anyio
BODY = json.dumps(small_request()).encode()


@asynchronous
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"])
@pytest.mark.parametrize("path", PATHS)
async def test_another_method_is_405_everywhere(api: httpx.AsyncClient, method: str, path: str) -> None:
    request = api.build_request("GET", path)
    request.method = method
    response = await api.send(request)
    if method == "HEAD" and path == "/openapi.json":  # the framework's own, which has both
        assert response.status_code == 200
        return
    if method == "HEAD":  # its answer has no body
        assert response.status_code == 405
    else:
        assert_problem(response, "method-not-allowed")
    assert set(response.headers["allow"].split(", ")) <= {"GET", "HEAD", "POST", "DELETE"}


@asynchronous
@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("POST", "/v1/plans?detail=groups"),
        ("POST", "/v1/pools?wait=3"),
        ("GET", "/v1/pools?pool=mimo"),
        ("GET", "/v1/pools?name=a&name=b"),
        ("GET", "/v1/pools?NAME=a"),
        ("GET", "/v1/pools?=a"),
        ("GET", "/v1/pools?%ff=%ff"),
        ("GET", "/v1/pools/pool-0123456789abcdef?waits=3"),
        ("DELETE", "/v1/pools/pool-0123456789abcdef?forced=true"),
        ("DELETE", "/v1/pools/pool-0123456789abcdef?force=1"),
        ("GET", "/v1/pools/pool-0123456789abcdef/tensors?layer=a"),
        ("GET", "/v1/devices?verbose"),
        ("GET", "/metrics?name[]=a"),
        ("GET", "/v1/plans/sha256:00?detial=groups"),
        ("GET", "/v1/plans/sha256:00?detail=all"),
        ("GET", "/v1/plans/sha256:00?detail="),
        ("GET", "/v1/plans/sha256:00?detail=full&detail=groups"),
        ("GET", "/v1/plans/sha256:00?" + "x" * 5000),
    ],
)
async def test_a_query_parameter_nobody_knows_is_refused(api: httpx.AsyncClient, method: str, url: str) -> None:
    response = await api.request(method, url, content=BODY, headers={"Content-Type": "application/json"})
    body = assert_problem(response, "spec-invalid")
    assert "x" * 201 not in body["detail"]


@asynchronous
@pytest.mark.parametrize(
    "wait", ["-1", "x", "nan", "", "inf", "1e", "1_0", " 5", "+5", "0x1", "5s", "%D9%A3", "%ff", "1" * 500, "5%00"]
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_wait_is_a_plain_number(api: httpx.AsyncClient, method: str, wait: str) -> None:
    assert_problem(await api.request(method, f"/v1/pools/pool-0123456789abcdef?wait={wait}"), "spec-invalid")


@asynchronous
@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health"])
async def test_probes_ignore_what_an_orchestrator_adds(api: httpx.AsyncClient, path: str) -> None:
    assert (await api.get(f"{path}?exclude=etcd&timeout=5s")).json()["status"] in ("ok", "not-ready")


@asynchronous
@pytest.mark.parametrize(
    "segment",
    ["..", "%2e%2e", "%2F", "a/b", "%00", "%ff", "%F0%9F%92%A9", "%ED%A0%80", ";a=b", "pool-0123456789ABCDEF",
     "pool-0123456789abcdef%0A", "x" * 5000, "*", "~", "%25"],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["/v1/pools/", "/v1/plans/"])
async def test_an_odd_path_segment_names_nothing(api: httpx.AsyncClient, prefix: str, segment: str) -> None:
    response = await api.get(httpx.URL("http://127.0.0.1:8000").copy_with(raw_path=(prefix + segment).encode()))
    body = response.json()
    assert_problem(response, body["code"])
    assert body["code"] in ("pool-not-found", "plan-not-found", "not-found")
    assert "x" * 201 not in response.text


@asynchronous
@pytest.mark.parametrize(
    "headers",
    [
        [("Content-Type", "application/json"), ("Content-Type", "text/plain")],
        [("Content-Type", "application/json"), ("Content-Encoding", "identity"), ("Content-Encoding", "gzip")],
        [("Content-Type", "application/json"), ("Content-Encoding", "deflate")],
        [("Content-Type", "application/json;charset=utf-16")],
        [("Content-Type", "application/json;charset=UTF-8;charset=latin-1")],
        [("Content-Type", "application/json, text/plain")],
        [("Content-Type", "text/json")],
    ],
)
async def test_two_answers_to_what_a_body_is_are_none(api: httpx.AsyncClient, headers: list[tuple[str, str]]) -> None:
    for path in ("/v1/plans", "/v1/pools"):
        assert_problem(await api.post(path, content=BODY, headers=headers), "unsupported-media-type")


@asynchronous
async def test_a_body_where_none_belongs_is_ignored(api: httpx.AsyncClient) -> None:
    request = api.build_request("GET", "/livez", content=b"\xff" * 1000)
    assert (await api.send(request)).status_code == 200


# --- as bytes, to a real server ---------------------------------------------------------------------------------------


def exchange(service: ApiService, request: bytes, *, half_close: bool = False) -> bytes:
    """Everything the server answers to a connection that sends `request` and asks for nothing else."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(service.run_directory.api_socket))
        sock.sendall(request)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: kvpage", "Connection: close", *headers, "", ""]).encode("latin-1")


POST = ("POST /v1/plans HTTP/1.1", "Content-Type: application/json")


def test_a_chunked_body_is_read_like_any_other(shared_service: ApiService) -> None:
    halves = BODY[:100], BODY[100:]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(half), half) for half in halves) + b"0\r\n\r\n"
    answer = exchange(shared_service, head(*POST, "Transfer-Encoding: chunked") + chunks)
    assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 201 "))
    bad = exchange(shared_service, head(*POST, "Transfer-Encoding: chunked") + b"3\r\n{]}\r\n0\r\n\r\n")
    assert bad.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"json-invalid"' in bad


@pytest.mark.parametrize(
    "request_",
    [
        head(*POST, "Content-Length: 100") + b"{",
        head(*POST, "Transfer-Encoding: chunked") + b"64\r\n{",
        head(*POST, "Transfer-Encoding: chunked"),
        head(*POST, "Content-Length: 100", "Content-Encoding: gzip"),
    ],
)
def test_a_body_that_ends_early_is_no_fault_of_the_server(shared_service: ApiService, request_: bytes) -> None:
    answer = exchange(shared_service, request_, half_close=True)
    assert b" 500 " not in answer.partition(b"\r\n")[0]
    assert "Traceback" not in shared_service.log()
    with shared_service.client() as client:
        assert client.health().status == "ready"


@pytest.mark.parametrize(
    "request_",
    [
        head(*POST, "Content-Length: 2", "Transfer-Encoding: chunked") + b"0\r\n\r\n{}",
        head(*POST, "Content-Length: 2", "Content-Length: 3") + b"{}",
        head(*POST, "Content-Length: 1e1") + b"{}",
        head(*POST, "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n",
        head("GET /v1/plans/\xff HTTP/1.1"),
        head("GET /livez HTTP/9.9"),
        head("GET /livez HTTP/1.1", "X: a\x00b"),
        head("GET /livez HTTP/1.1", "bad header"),
    ],
)
def test_broken_framing_is_400(shared_service: ApiService, request_: bytes) -> None:
    answer = exchange(shared_service, request_)
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert "Traceback" not in shared_service.log()


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("HEAD /livez HTTP/1.1", 405),
        ("OPTIONS * HTTP/1.1", 404),
        ("OPTIONS /v1/plans HTTP/1.1", 405),
        ("TRACE /v1/pools HTTP/1.1", 405),
        ("GET //v1/plans HTTP/1.1", 404),
        ("GET /v1/../livez HTTP/1.1", 404),
        ("GET /%zz HTTP/1.1", 404),
        ("GET /v1/plans/%ff%00 HTTP/1.1", 404),
        ("GET http://elsewhere.example/livez HTTP/1.1", 200),
        ("GET /livez?%ff=%zz&&&= HTTP/1.1", 200),
        ("GET /v1/pools?%ff=%zz HTTP/1.1", 422),
        ("PRI * HTTP/2.0", 400),
    ],
)
def test_odd_request_lines(shared_service: ApiService, line: str, status: int) -> None:
    answer = exchange(shared_service, head(line))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    if line.startswith("HEAD"):
        assert answer.endswith(b"\r\n\r\n")  # no body
    assert "Traceback" not in shared_service.log()
