"""No body is read past the limit, whatever its declared length says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from kvpage_server.settings import MAX_BODY_BYTES
from support.plan_requests import small_request
from support.problems import assert_problem

pytestmark = pytest.mark.anyio
JSON = {"Content-Type": "application/json"}


class CountedBody:
    """A body sent in pieces without a declared length."""

    def __init__(self, num_bytes: int, piece_bytes: int = 1 << 16) -> None:
        self.num_bytes = num_bytes
        self.sent_bytes = 0
        self._piece = b" " * piece_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.sent_bytes < self.num_bytes:
            self.sent_bytes += len(self._piece)
            yield self._piece
            await asyncio.sleep(0)


async def test_a_declared_length_over_the_limit_is_refused(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/plans", content=b" " * (MAX_BODY_BYTES + 1), headers=JSON)
    body = assert_problem(response, "too-large")
    assert body["details"]["limit_bytes"] == MAX_BODY_BYTES
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/pools"])
@pytest.mark.parametrize("headers", [JSON, {**JSON, "Content-Length": "10"}])
async def test_bytes_are_counted_as_they_arrive(api: httpx.AsyncClient, path: str, headers: dict[str, str]) -> None:
    content = CountedBody(8 * MAX_BODY_BYTES)
    assert_problem(await api.post(path, content=content, headers=headers), "too-large")
    assert content.sent_bytes <= MAX_BODY_BYTES + (1 << 17)


async def test_a_body_of_just_the_limit_is_read(api: httpx.AsyncClient) -> None:
    body = json.dumps(small_request()).encode()
    padded = body + b" " * (MAX_BODY_BYTES - len(body))
    assert (await api.post("/v1/plans", content=padded, headers=JSON)).status_code == 201


async def test_many_layers_are_refused_before_they_are_expanded(api: httpx.AsyncClient) -> None:
    request = small_request()
    request["layers"][0]["count"] = 4096
    assert_problem(await api.post("/v1/plans", json=request), "spec-invalid")
    request["layers"] = [dict(request["layers"][1], count=2**62)]
    assert_problem(await api.post("/v1/plans", json=request), "spec-invalid")
