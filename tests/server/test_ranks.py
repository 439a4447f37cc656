"""Plans of several ranks over HTTP: in one answer, each kept under its own id, a pool from one."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import pytest

import kvpage
from kvpage.ranked_plan import RankedPlan
from kvpage_server.encoded_plans import MAX_RANKS_BYTES
from support.plan_requests import MEMORY_BYTES, small_request, wide_request
from support.problems import assert_problem

pytestmark = pytest.mark.anyio
PLAIN = {"Accept-Encoding": "identity"}
HALVES: list[dict[str, Any]] = [
    {"layers": {"start": 0, "end": 10}},
    {"layers": ["draft.{i}"], "memory_bytes": 2 * MEMORY_BYTES},
    {"layers": {"start": 0, "end": 10}},
]


async def test_the_plans_are_those_of_the_library_and_each_is_kept(api: httpx.AsyncClient) -> None:
    request = small_request(ranks=HALVES)
    response = await api.post("/v1/plans", json=request, headers=PLAIN)
    assert response.status_code == 201
    assert not {"etag", "location"} & set(response.headers)
    assert response.headers["cache-control"] == "no-store"
    plans = RankedPlan.from_json(response.content)
    assert plans == kvpage.plan_ranks(request)
    assert [plan["plan_id"] for plan in response.json()["ranks"]] == [plan.plan_id for plan in plans.ranks]
    for plan in plans.ranks:
        kept = await api.get(f"/v1/plans/{plan.plan_id}", headers=PLAIN)
        assert kept.content == plan.to_json()


async def test_the_answer_is_200_when_all_its_plans_were_there(api: httpx.AsyncClient) -> None:
    first = await api.post("/v1/plans", json=small_request(ranks=HALVES[:2]))
    again = await api.post("/v1/plans", json=small_request(ranks=HALVES))
    other = await api.post("/v1/plans", json=small_request(ranks=[*HALVES, {"memory_bytes": MEMORY_BYTES + 1}]))
    assert [response.status_code for response in (first, again, other)] == [201, 200, 201]


async def test_a_large_answer_is_compressed_where_that_is_accepted(api: httpx.AsyncClient) -> None:
    request = wide_request() | {"ranks": [{}, {}]}
    async with api.stream("POST", "/v1/plans", json=request, headers={"Accept-Encoding": "gzip"}) as response:
        raw = b"".join([part async for part in response.aiter_raw()])
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["vary"] == "Accept-Encoding"
    assert gzip.decompress(raw) == kvpage.plan_ranks(request).to_json()


async def test_what_is_wrong_is_named_with_its_place(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/plans", json=small_request(ranks=[{"layers": ["nobody"]}]))
    problem = assert_problem(answer, "spec-invalid")
    assert problem["errors"][0]["pointer"] == "/ranks/0/layers/0"
    answer = await api.post("/v1/plans", json=small_request(ranks=[{}, {"memory_bytes": 9}]))
    problem = assert_problem(answer, "not-enough-memory")
    assert problem["errors"][0]["pointer"] == "/ranks/1"
    assert problem["details"]["rank"] == 1


async def test_an_answer_that_is_too_large_is_not_sent(api: httpx.AsyncClient) -> None:
    """Two thousand bytes that would be answered with more than the bound."""
    request = wide_request(4096) | {"ranks": [{}] * 16}
    problem = assert_problem(await api.post("/v1/plans", json=request), "too-large")
    assert problem["details"]["limit_bytes"] == MAX_RANKS_BYTES
    assert problem["details"]["size_bytes"] > MAX_RANKS_BYTES


async def test_all_ranks_of_a_model_are_asked_for_by_name(api: httpx.AsyncClient) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "torch_dtype": "bfloat16",
    }  # fmt: skip
    request = {"strategy": "unify", "memory_bytes": MEMORY_BYTES, "model": {"config": config, "tp": 4, "pp": 2}}
    one = (await api.post("/v1/plans", json=request)).json()
    answer = (await api.post("/v1/plans", json=request | {"ranks": "all"})).json()
    assert len(answer["ranks"]) == 8
    assert answer["kv_replicas"] == 2
    assert one["plan_id"] == answer["ranks"][0]["plan_id"]
