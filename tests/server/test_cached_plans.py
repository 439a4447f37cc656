"""What is in the cache is answered without the framework, and exactly as the framework would."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

import kvpage
from kvpage_server.cached_plans import CachedPlans
from kvpage_server.plan_cache import PlanCache
from kvpage_server.planning import Planned, PlanService
from support.api_in_process import BASE_URL
from support.plan_requests import small_request, wide_request
from support.problems import assert_problem

pytestmark = pytest.mark.anyio

BODY = json.dumps(wide_request()).encode()
JSON = {"Content-Type": "application/json"}
# The same to the reader of the header, and not what the short cut looks for.
ROUNDABOUT = {"Content-Type": "application/json; charset=utf-8"}


def without_id(response: httpx.Response) -> tuple[int, dict[str, str], bytes]:
    headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
    return response.status_code, headers, response.content


@pytest.mark.parametrize("coding", ["identity", "gzip", "gzip;q=0", "*", "br"])
async def test_both_ways_give_the_same_answers(api: httpx.AsyncClient, coding: str) -> None:
    accept = {"Accept-Encoding": coding}
    first = await api.post("/v1/plans", content=BODY, headers={**ROUNDABOUT, **accept})
    assert first.status_code == 201
    posted = await api.post("/v1/plans", content=BODY, headers={**JSON, **accept})
    assert without_id(posted) == without_id(await api.post("/v1/plans", content=BODY, headers={**ROUNDABOUT, **accept}))
    path = first.headers["location"]
    got = await api.get(path, headers=accept)
    assert without_id(got) == without_id(await api.get(f"{path}?detail=full", headers=accept))
    assert (got.content, got.headers["etag"]) == (first.content, first.headers["etag"])


class Framework:
    """Counts what reaches it, reads bodies, and answers 404."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, is_more = b"", True
        while is_more:
            message = await receive()
            body, is_more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def test_only_ordinary_requests_for_known_plans_take_the_short_cut(run_dir: Path) -> None:
    plans, framework = PlanService(kvpage.plan, PlanCache(1 << 20)), Framework()
    transport = httpx.ASGITransport(CachedPlans(framework, plans=lambda: plans))
    planned = await plans.plan_body(BODY, max_bytes=1 << 20)
    assert isinstance(planned, Planned)
    path = f"/v1/plans/{planned.plan_id}"
    async with httpx.AsyncClient(
        transport=transport, base_url=BASE_URL, headers={"Accept-Encoding": "identity"}
    ) as api:
        for response in (await api.get(path), await api.post("/v1/plans", content=BODY, headers=JSON)):
            assert response.content == plans.full(planned.plan_id)
        assert framework.bodies == []
        etag = {"If-None-Match": "*"}
        twice = [("Accept-Encoding", "identity"), ("Accept-Encoding", "gzip")]
        for request in (
            api.build_request("POST", "/v1/plans", content=BODY + b" ", headers=JSON),
            api.build_request("POST", "/v1/plans", content=BODY, headers={**JSON, "Content-Encoding": "gzip"}),
            api.build_request("POST", "/v1/plans", content=BODY, headers=ROUNDABOUT),
            api.build_request("POST", "/v1/plans?x=1", content=BODY, headers=JSON),
            api.build_request("POST", path, content=BODY, headers=JSON),
            api.build_request("GET", path, headers=etag),
            api.build_request("GET", path, headers=twice),
            api.build_request("GET", path, headers={"Accept-Encoding": "gzip"}),  # not compressed yet
            api.build_request("GET", path + "0"),
            api.build_request("GET", path + "?detail=groups"),
            api.build_request("HEAD", path),
            api.build_request("DELETE", path),
        ):
            assert (await api.send(request)).status_code == 404, request

            assert framework.bodies.pop() == request.content
    assert framework.bodies == []
    plans.close()


async def test_access_is_checked_before_the_short_cut(api_over_tcp: httpx.AsyncClient) -> None:
    posted = await api_over_tcp.post("/v1/plans", json=small_request())
    path = posted.headers["location"]
    assert (await api_over_tcp.get(path)).status_code == 200
    assert_problem(await api_over_tcp.get(path, headers={"Host": "evil.example"}), "permission-denied")
    assert_problem(await api_over_tcp.get(path, headers={"Authorization": "Bearer x"}), "unauthorized")
