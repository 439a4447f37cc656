"""Bodies up to the limit are read, and what they spell is bounded before it is expanded."""

from __future__ import annotations

import json

import httpx
import pytest

from kvpage.strict_json import MAX_BODY_BYTES
from support.plan_requests import small_request
from support.problems import assert_problem

pytestmark = pytest.mark.anyio
JSON = {"Content-Type": "application/json"}


async def test_a_body_of_just_the_limit_is_read(api: httpx.AsyncClient) -> None:
    body = json.dumps(small_request()).encode()
    padded = body + b" " * (MAX_BODY_BYTES - len(body))
    assert (await api.post("/v1/plans", content=padded, headers=JSON)).status_code == 201
    assert_problem(await api.post("/v1/plans", content=padded + b" ", headers=JSON), "too-large")


async def test_many_layers_are_refused_before_they_are_expanded(api: httpx.AsyncClient) -> None:
    request = small_request()
    request["layers"][0]["count"] = 4096
    assert_problem(await api.post("/v1/plans", json=request), "spec-invalid")
    request["layers"] = [dict(request["layers"][1], count=2**62)]
    assert_problem(await api.post("/v1/plans", json=request), "spec-invalid")
