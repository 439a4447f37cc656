"""`/v1/plans`: planned once, named by content, sent as the caller can read it."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvpage
from kvpage.errors import CannotUnify, RateLimited
from kvpage.plans import Plan
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages
from kvpage_server.app import create_app
from kvpage_server.plan_cache import PlanCache
from kvpage_server.plan_queue import MAX_PENDING, PlanQueue
from kvpage_server.planning import PlanService
from kvpage_server.settings import Settings
from support.api_in_process import in_process, settings_without_worker
from support.plan_requests import small_request, wide_request
from support.problems import assert_problem
from support.worker_process import WorkerProcess

pytestmark = pytest.mark.anyio
PLAIN = {"Accept-Encoding": "identity"}


async def test_a_plan_is_that_of_the_library(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/plans", json=small_request(), headers=PLAIN)
    plan = Plan.from_json(response.content)
    assert plan == kvpage.plan(small_request())
    assert response.headers["location"] == f"/v1/plans/{plan.plan_id}"
    assert response.headers["etag"] == f'"{plan.plan_id}"'
    assert response.headers["content-type"] == "application/json"


async def test_the_first_answer_is_201_and_every_later_one_200(api: httpx.AsyncClient) -> None:
    first = await api.post("/v1/plans", json=small_request())
    again = await api.post("/v1/plans", json=small_request())
    spelt_differently = await api.post("/v1/plans", json=small_request(kv_cache_layout="NHD"))
    assert [response.status_code for response in (first, again, spelt_differently)] == [201, 200, 200]
    assert first.content == again.content == spelt_differently.content
    assert again.headers["location"] == first.headers["location"]


async def test_the_same_bytes_are_not_planned_again(run_dir: Path) -> None:
    planned = []

    def counting(request: Mapping[str, Any]) -> Plan:
        planned.append(request)
        return kvpage.plan(request)

    async with in_process(create_app(settings_without_worker(run_dir), planner=counting)) as api:
        for _ in range(3):
            await api.post("/v1/plans", json=small_request())
        await api.post("/v1/plans", json=small_request(memory_bytes=None, num_blocks=200))
    assert len(planned) == 2


async def test_a_plan_can_be_got_again_and_kept_for_ever(api: httpx.AsyncClient) -> None:
    posted = await api.post("/v1/plans", json=small_request(), headers=PLAIN)
    got = await api.get(posted.headers["location"], headers=PLAIN)
    assert got.status_code == 200
    assert got.content == posted.content
    assert "immutable" in got.headers["cache-control"]
    assert got.headers["etag"] == posted.headers["etag"]


@pytest.mark.parametrize("tag", ["{etag}", "W/{etag}", '"other", {etag}', "*"])
async def test_a_caller_that_has_the_plan_gets_304(api: httpx.AsyncClient, tag: str) -> None:
    posted = await api.post("/v1/plans", json=small_request(), headers=PLAIN)
    header = tag.format(etag=posted.headers["etag"])
    got = await api.get(posted.headers["location"], headers={**PLAIN, "If-None-Match": header})
    assert got.status_code == 304
    assert got.content == b""
    assert got.headers["etag"] == posted.headers["etag"]


@pytest.mark.parametrize("tag", ['"sha256:00"', "{id}", '"{id}-groups-identity"'])
async def test_another_tag_gets_the_plan(api: httpx.AsyncClient, tag: str) -> None:
    posted = await api.post("/v1/plans", json=small_request(), headers=PLAIN)
    header = tag.format(id=posted.json()["plan_id"])
    got = await api.get(posted.headers["location"], headers={**PLAIN, "If-None-Match": header})
    assert got.status_code == 200


async def test_the_groups_come_without_the_layers(api: httpx.AsyncClient) -> None:
    posted = await api.post("/v1/plans", json=small_request())
    whole = posted.json()
    groups = await api.get(posted.headers["location"], params={"detail": "groups"})
    del whole["layers"]
    assert groups.json() == whole
    assert groups.headers["etag"] != posted.headers["etag"]
    full = await api.get(posted.headers["location"], params={"detail": "full"})
    assert full.content == posted.content
    assert_problem(await api.get(posted.headers["location"], params={"detail": "layers"}), "spec-invalid")


async def test_a_large_plan_is_compressed_for_those_who_accept_it(api: httpx.AsyncClient) -> None:
    plain = await api.post("/v1/plans", json=wide_request(), headers=PLAIN)
    assert "content-encoding" not in plain.headers
    for path in (plain.headers["location"], f"{plain.headers['location']}?detail=groups"):
        with_gzip = await api.get(path, headers={"Accept-Encoding": "br, gzip;q=0.5"})
        without = await api.get(path, headers={"Accept-Encoding": "gzip;q=0, *;q=0"})
        assert with_gzip.headers["content-encoding"] == "gzip"
        assert "content-encoding" not in without.headers
        assert with_gzip.content == without.content
        assert with_gzip.headers["etag"] != without.headers["etag"]
        assert with_gzip.headers["vary"] == without.headers["vary"] == "Accept-Encoding"
        assert int(with_gzip.headers["content-length"]) < len(without.content) / 4


async def test_compressed_bytes_are_the_same_every_time(api: httpx.AsyncClient) -> None:
    posted = await api.post("/v1/plans", json=wide_request(), headers={"Accept-Encoding": "gzip"})
    raw = []
    for _ in range(2):
        async with api.stream("GET", posted.headers["location"], headers={"Accept-Encoding": "gzip"}) as response:
            raw.append(b"".join([chunk async for chunk in response.aiter_raw()]))
    assert raw[0] == raw[1]
    assert gzip.decompress(raw[0]) == posted.content


async def test_a_small_plan_is_not_compressed(api: httpx.AsyncClient) -> None:
    posted = await api.post("/v1/plans", json=small_request())
    groups = await api.get(f"{posted.headers['location']}?detail=groups", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in groups.headers


async def test_a_plan_nobody_made_is_404(api: httpx.AsyncClient) -> None:
    for plan_id in ("sha256:" + "0" * 64, "x" * 3000):
        body = assert_problem(await api.get(f"/v1/plans/{plan_id}"), "plan-not-found")
        assert "x" * 201 not in str(body)


async def test_a_forgotten_plan_is_404_until_it_is_posted_again(run_dir: Path) -> None:
    room_for_three = 3 * len(kvpage.plan(small_request()).to_json())
    settings = settings_without_worker(run_dir, plan_cache_bytes=room_for_three)
    async with in_process(create_app(settings)) as api:
        first = await api.post("/v1/plans", json=small_request())
        for blocks in range(200, 206):
            other = await api.post("/v1/plans", json=small_request(memory_bytes=None, num_blocks=blocks))
            assert other.status_code == 201
        assert_problem(await api.get(first.headers["location"]), "plan-not-found")
        again = await api.post("/v1/plans", json=small_request())
        assert again.status_code == 201
        assert (await api.get(first.headers["location"])).content == first.content


async def test_faults_are_pointed_at(api: httpx.AsyncClient) -> None:
    request = small_request(unknown=1)
    request["layers"][1]["block_size"] = "16"
    request["layers"][0]["head_size"] = True
    body = assert_problem(await api.post("/v1/plans", json=request), "spec-invalid")
    assert {fault["pointer"] for fault in body["errors"]} == {"/unknown", "/layers/1/block_size", "/layers/0/head_size"}


async def test_codes_below_spec_invalid_arrive_with_their_details(run_dir: Path) -> None:
    def refusing(request: Mapping[str, Any]) -> Plan:
        raise CannotUnify("layer a has pages of 3, b of 2", details={"layer": "a", "page_size_bytes": 3})

    async with in_process(create_app(settings_without_worker(run_dir), planner=refusing)) as api:
        body = assert_problem(await api.post("/v1/plans", json=small_request()), "cannot-unify-page-size")
    assert body["details"] == {"layer": "a", "page_size_bytes": 3}


async def test_the_answer_says_what_the_search_weighed(api: httpx.AsyncClient) -> None:
    request = small_request(strategy="auto", allocator="slabs")
    body = (await api.post("/v1/plans", json=request)).json()
    assert body["plan_id"] == kvpage.plan(request).plan_id
    assert body["efficiency"]["held_over_live"] >= body["efficiency"]["floor_over_live"] >= 1
    assert {other["strategy"] for other in body["rejected"]} == {"unify", "scale_then_pad", "slab", "nested"} - {
        body["strategy"]
    }


async def test_what_a_search_says_is_said_to_who_asked(api: httpx.AsyncClient) -> None:
    """One plan, asked for in four ways: its id is the same, what the search says of it is not."""
    requests = [
        small_request(strategy="unify"),
        small_request(strategy="unify", workload=[{"tokens": 300}]),
        small_request(strategy="unify", workload=[{"tokens": 100_000}]),
        small_request(strategy="unify", workload=[{"tokens": 300}]),
    ]
    etags = []
    for request in (*requests, *reversed(requests)):
        for encoding in ("identity", "gzip"):
            answer = await api.post("/v1/plans", json=request, headers={"Accept-Encoding": encoding})
            assert kvpage.Plan.from_json(answer.content) == kvpage.plan(request)
        etags.append(answer.headers["etag"])
    assert len({kvpage.plan(request).plan_id for request in requests}) == 1
    assert len(set(etags)) == 3
    by_id = await api.get(f"/v1/plans/{kvpage.plan(requests[0]).plan_id}")
    assert kvpage.Plan.from_json(by_id.content) == kvpage.plan(requests[0])


@pytest.mark.parametrize("body", ["[]", "null", "1", '"layers"', "true"])
async def test_a_request_that_is_no_object_is_refused(api: httpx.AsyncClient, body: str) -> None:
    response = await api.post("/v1/plans", content=body, headers={"Content-Type": "application/json"})
    assert_problem(response, "spec-invalid")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": ""},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/jsonp"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
async def test_a_body_that_is_not_declared_as_plain_json_is_415(
    api: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    assert_problem(await api.post("/v1/plans", content=b"{}", headers=headers), "unsupported-media-type")
    assert_problem(await api.post("/v1/pools", content=b"{}", headers=headers), "unsupported-media-type")


@pytest.mark.parametrize(
    "declared", ["application/json", "Application/JSON ; charset=UTF-8", 'application/json;charset="utf-8"']
)
async def test_json_may_be_declared_in_several_ways(api: httpx.AsyncClient, declared: str) -> None:
    response = await api.post("/v1/plans", content=b"[]", headers={"Content-Type": declared})
    assert_problem(response, "spec-invalid")


async def test_the_loop_answers_while_a_plan_is_computed(run_dir: Path) -> None:
    computing, finish = threading.Event(), threading.Event()

    def slow(request: Mapping[str, Any]) -> Plan:
        computing.set()
        assert finish.wait(60)
        return kvpage.plan(request)

    async with in_process(create_app(settings_without_worker(run_dir), planner=slow)) as api:
        planning = asyncio.ensure_future(api.post("/v1/plans", json=small_request()))
        assert await asyncio.to_thread(computing.wait, 60)
        alive = await api.get("/livez")
        assert not planning.done()
        finish.set()
        assert (await planning).status_code == 201
    assert alive.json() == {"status": "ok"}


async def test_while_as_many_plans_as_may_be_are_computed_only_another_one_is_refused(run_dir: Path) -> None:
    computing, finish = threading.Event(), threading.Event()

    def slow(request: Mapping[str, Any]) -> Plan:
        if request["num_blocks"] > 100:
            computing.set()
            assert finish.wait(60)
        return same

    def numbered(num_blocks: int) -> dict[str, Any]:
        return small_request(memory_bytes=None, num_blocks=num_blocks)

    same = kvpage.plan(numbered(100))  # for all of them: a thousand take long
    async with in_process(create_app(settings_without_worker(run_dir), planner=slow)) as api:
        known = await api.post("/v1/plans", json=numbered(100))
        planning = [asyncio.ensure_future(api.post("/v1/plans", json=numbered(101 + n))) for n in range(MAX_PENDING)]
        try:
            assert await asyncio.to_thread(computing.wait, 60)
            refused = await asyncio.wait_for(api.post("/v1/plans", json=numbered(9999)), 60)
            again = await api.post("/v1/plans", json=numbered(100))
            alive = await api.get("/livez")
            assert not any(task.done() for task in planning)
        finally:
            finish.set()  # or the end of the server would wait for the plans
        assert_problem(refused, "rate-limited")
        assert (again.content, alive.status_code) == (known.content, 200)
        assert {(await task).status_code for task in planning} == {200}
        assert (await api.post("/v1/plans", json=numbered(9999))).status_code == 200


async def test_too_many_plans_at_once_are_refused() -> None:
    computing, finish = threading.Event(), threading.Event()

    def slow() -> str:
        computing.set()
        assert finish.wait(60)
        return "planned"

    plans = PlanService(kvpage.plan, PlanCache(1 << 20), PlanQueue(max_pending=1))
    try:
        planning = asyncio.ensure_future(plans.in_thread(slow))
        assert await asyncio.to_thread(computing.wait, 60)
        with pytest.raises(RateLimited):
            await plans.in_thread(slow)
        finish.set()
        assert await planning == "planned"
        assert await plans.in_thread(slow) == "planned"
    finally:
        plans.close()


async def test_the_largest_plan_that_is_served_has_a_bound(api: httpx.AsyncClient) -> None:
    layer = {"kind": "mamba", "shapes": [[1]] * 64, "dtypes": ["float32"] * 64}
    request = {"layers": [{"name": "m.{i}", "count": 4096, **layer}], "strategy": "unify", "num_blocks": 2}
    body = assert_problem(await api.post("/v1/plans", json=request), "too-large")
    assert body["details"]["size_bytes"] > body["details"]["limit_bytes"]


async def test_a_pool_with_another_plan_than_it_names_makes_no_plan_known(run_dir: Path) -> None:
    """Whoever may use the worker may name any plan id; the API serves and remembers only plans that are proven."""
    plan = kvpage.plan(small_request())
    with WorkerProcess(run_dir, "--memory", "64MiB") as worker, worker.client() as client:
        body = messages.CreatePool(
            name="false", plan_id=plan.plan_id, plan=b'{"hello":"world"}', buffer_size_bytes=plan.buffer_size_bytes
        )
        pool_id = client.ask(body, messages.PoolCreated).pool.pool_id
        client.ask(messages.WaitPool(pool_id=pool_id, timeout_s=60), messages.PoolState)
        settings = Settings(run_directory=RunDirectory(run_dir), external_workers=True)
        async with in_process(create_app(settings)) as api:
            while [pool["state"] for pool in (await api.get("/v1/pools")).json().get("pools", [])] != ["ready"]:
                await api.get(f"/v1/pools/{pool_id}", params={"wait": "1"})
            for query in ("", "?detail=groups"):
                answer = await api.get(f"/v1/plans/{plan.plan_id}{query}")
                assert (answer.status_code, answer.json()["code"]) == (404, "plan-not-found")
            posted = await api.post("/v1/plans", json=small_request())
            assert posted.status_code == 201
            assert Plan.from_json(posted.content) == plan
