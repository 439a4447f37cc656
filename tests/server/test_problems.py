"""Every failure is an RFC 9457 problem that says enough and repeats no more of the input than it may."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvpage.errors import ERRORS_BY_CODE, FieldError, KvpageError, Unauthorized, error_from_code
from kvpage.plans import Plan
from kvpage_server.app import create_app
from kvpage_server.logs import formatter
from kvpage_server.problems import MAX_DETAIL_CHARS, MAX_ERRORS, problem_of, problem_response
from support.api_in_process import in_process, settings_without_worker
from support.plan_requests import small_request
from support.problems import REQUIRED, assert_problem


@pytest.mark.parametrize("code", ERRORS_BY_CODE)
def test_every_error_becomes_a_problem_with_its_own_title(code: str) -> None:
    error = error_from_code(code, "what", details={"size_bytes": 7}, errors=[FieldError("/a", "b")])
    response = problem_response(error, "id-1")
    body = msgspec.json.decode(bytes(response.body))
    assert body.keys() == REQUIRED | {"errors", "details"}
    assert response.status_code == body["status"] == ERRORS_BY_CODE[code].http_status
    assert body["errors"] == [{"pointer": "/a", "detail": "b"}]
    assert body["details"] == {"size_bytes": 7}
    assert len({problem_of(error_from_code(other, ""), "").title for other in ERRORS_BY_CODE}) == len(ERRORS_BY_CODE)


def test_what_a_problem_repeats_is_short_and_printable() -> None:
    class Strange:
        def __repr__(self) -> str:
            return "strange " * 1000

    details = {"k" * 1000: "v" * 1000, "half": "\ud800", "nested": {"list": [("x" * 1000, Strange(), None, 1.5, True)]}}
    faults = [FieldError("/" + "p" * 1000, "d" * 10_000)] * 500
    problem = problem_of(KvpageError("m\udfff" + "m" * 10_000, details=details, errors=faults), "id")
    encoded = msgspec.json.encode(problem)
    assert b"vvvv" in encoded
    assert "v" * 201 not in encoded.decode()
    assert "k" * 201 not in encoded.decode()
    assert "p" * 201 not in encoded.decode()
    assert len(problem.detail) == MAX_DETAIL_CHARS
    assert problem.detail.startswith("m\\udfff")
    assert len(problem.errors) == MAX_ERRORS + 1
    assert problem.errors[-1]["detail"] == f"and {500 - MAX_ERRORS} more"


def test_a_refused_token_names_its_scheme() -> None:
    assert problem_response(Unauthorized("no"), "id").headers["www-authenticate"] == "Bearer"


asynchronous = pytest.mark.anyio


@asynchronous
@pytest.mark.parametrize("path", ["/v1", "/v1/plans/", "/v2/plans", "/metric", "/v1/event", "/docs", "/redoc"])
async def test_a_path_that_is_not_there_is_404(api: httpx.AsyncClient, path: str) -> None:
    assert_problem(await api.get(path), "not-found")


@asynchronous
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/plans", "POST"),
        ("GET", "/v1/plans", "POST"),
        ("POST", "/v1/plans/sha256:00", "GET"),
        ("PATCH", "/v1/pools", "GET, POST"),
        ("PUT", "/v1/pools/pool-00", "DELETE, GET"),
        ("POST", "/v1/pools/pool-00/tensors", "GET"),
        ("POST", "/livez", "GET"),
        ("DELETE", "/v1/devices", "GET"),
    ],
)
async def test_another_method_is_405_and_allow_names_all_that_work(
    api: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    response = await api.request(method, path)
    assert_problem(response, "method-not-allowed")
    assert response.headers["allow"] == allowed


@asynchronous
async def test_a_long_path_is_not_repeated(api: httpx.AsyncClient) -> None:
    body = assert_problem(await api.get("/" + "x" * 5000), "not-found")
    assert "x" * 201 not in body["detail"]


@pytest.fixture
def api_log() -> Iterator[io.StringIO]:
    """What the service logs, as it would be written."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(formatter(is_json=True))
    logging.getLogger("kvpage.api").addHandler(handler)
    yield log
    logging.getLogger("kvpage.api").removeHandler(handler)


@asynchronous
async def test_a_bug_is_a_500_without_a_word_about_its_cause(run_dir: Path, api_log: io.StringIO) -> None:
    def broken(request: Mapping[str, Any]) -> Plan:
        raise RuntimeError("the secret cause")

    async with in_process(create_app(settings_without_worker(run_dir), planner=broken)) as api:
        response = await api.post("/v1/plans", json=small_request(), headers={"X-Request-ID": "from-me.1"})
    body = assert_problem(response, "internal")
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert body["request_id"] == "from-me.1"
    [line] = [line for line in map(json.loads, api_log.getvalue().splitlines()) if line["event"] == "request failed"]
    assert line["request_id"] == "from-me.1"
    assert "the secret cause" in line["exception"]


@asynchronous
@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "é", 'quote"', "line\tbreak"])
async def test_a_strange_request_id_is_replaced(api: httpx.AsyncClient, given: str) -> None:
    response = await api.get("/livez", headers=[(b"X-Request-ID", given.encode())])
    assert response.headers["x-request-id"] != given
    assert len(response.headers["x-request-id"]) == 16
