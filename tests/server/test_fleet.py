"""`/v1/fleet`: what it says and does, and that nothing of Ray is loaded without it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import anyio
import httpx
import pytest

from kvpage.errors import DeviceUnavailable
from kvpage.fleet.manager import FleetManager
from kvpage_server.app import create_app
from simulated_fleet import MemoryTransport
from support.api_in_process import in_process, settings_without_worker
from support.memory_fleet import manager_of, small_fleet
from support.plan_requests import small_request
from support.problems import assert_problem

pytestmark = pytest.mark.anyio

PLAN = {"name": "mimo", "request": small_request(ranks=[{}, {}])}


async def joined(client: httpx.AsyncClient) -> None:
    await eventually(lambda: client.get("/v1/fleet"), lambda answer: answer.status_code == 200)


async def eventually(
    ask: Callable[[], Awaitable[httpx.Response]], is_so: Callable[[httpx.Response], bool]
) -> httpx.Response:
    with anyio.fail_after(60):
        while not is_so(answer := await ask()):
            await anyio.sleep(0.02)
    return answer


async def test_a_plan_is_made_shown_and_given_back(run_dir: Path) -> None:
    fleet = small_fleet()
    async with in_process(create_app(settings_without_worker(run_dir), join_fleet=lambda: manager_of(fleet))) as client:
        await joined(client)
        made = await client.post("/v1/fleet/plans", json=PLAN)
        assert made.status_code == 200
        plan = made.json()
        assert (plan["state"], plan["world_size"]) == ("ready", 2)
        assert made.headers["Location"] == f"/v1/fleet/plans/{plan['id']}"
        for asked in (plan["id"], "mimo"):
            assert (await client.get(f"/v1/fleet/plans/{asked}")).json() == plan
        shown = (await client.get("/v1/fleet")).json()
        assert [node["state"] for node in shown["nodes"]] == ["ready"] * 3
        assert shown["plans"] == [plan]
        assert (await client.delete(f"/v1/fleet/plans/{plan['id']}")).status_code == 204
        assert_problem(await client.get(f"/v1/fleet/plans/{plan['id']}"), "not-found")
    assert not [pool for node in fleet.nodes_by_name.values() for pool in node.service.pools()]


async def test_the_watch_mends_what_a_node_lost_and_tells_it(run_dir: Path) -> None:
    fleet = small_fleet()
    async with in_process(create_app(settings_without_worker(run_dir), join_fleet=lambda: manager_of(fleet))) as client:
        await joined(client)
        plan = (await client.post("/v1/fleet/plans", json=PLAN)).json()
        node = fleet.nodes_by_name[plan["ranks"][0]["node"]]
        node.service.lose()
        lost = plan["ranks"][0]["epoch"]
        answer = await eventually(
            lambda: client.get("/v1/fleet/plans/mimo"),
            lambda answer: answer.json()["state"] == "ready" and answer.json()["ranks"][0]["epoch"] != lost,
        )
        now = answer.json()
        assert now["ranks"][0]["epoch"] != plan["ranks"][0]["epoch"]


async def test_a_plan_that_a_lost_node_has_a_part_of_goes_when_that_returns(run_dir: Path) -> None:
    fleet = small_fleet()
    async with in_process(create_app(settings_without_worker(run_dir), join_fleet=lambda: manager_of(fleet))) as client:
        await joined(client)
        places = [{"node": "n0000", "device": "cuda:0"}, {"node": "n0001", "device": "cuda:1"}]
        await client.post("/v1/fleet/plans", json=PLAN | {"places": places})
        fleet.nodes_by_name["n0001"].reachable = False
        left = await client.delete("/v1/fleet/plans/mimo")
        assert (left.status_code, left.json()["state"], left.json()["unreachable"]) == (202, "releasing", ["n0001"])
        fleet.nodes_by_name["n0001"].reachable = True
        await eventually(lambda: client.get("/v1/fleet/plans/mimo"), lambda answer: answer.status_code == 404)
    assert not [pool for node in fleet.nodes_by_name.values() for pool in node.service.pools()]


@pytest.mark.parametrize(
    ("body", "code", "pointer"),
    [
        ({"name": "m/n"}, "spec-invalid", None),
        ({"request": {"strategy": "unify"}}, "spec-invalid", None),
        ({"places": [{"node": "n0000", "device": "cuda:0"}]}, "spec-invalid", None),
        ({"places": [{"node": "n0000", "device": "cuda:0"}] * 2}, "spec-invalid", "/places/1"),
        ({"places": [{"node": "x", "device": "cuda:0"}] * 2}, "spec-invalid", "/places/0"),
        ({"request": small_request(ranks=[{}] * 7)}, "not-enough-memory", None),
        ({"request": small_request(ranks=[{}] * 2, memory_bytes=1 << 30)}, "not-enough-memory", None),
        ({"more": 1}, "spec-invalid", None),
    ],
)
async def test_a_wrong_request_is_refused_and_nothing_is_kept(
    run_dir: Path, body: dict[str, object], code: str, pointer: str | None
) -> None:
    fleet = small_fleet()
    async with in_process(create_app(settings_without_worker(run_dir), join_fleet=lambda: manager_of(fleet))) as client:
        await joined(client)
        problem = assert_problem(await client.post("/v1/fleet/plans", json=PLAN | body), code)
        if pointer is not None:
            assert problem["errors"][0]["pointer"] == pointer
    assert not [kept for node in fleet.nodes_by_name.values() for kept in node.records.all()]


async def test_without_a_fleet_the_server_says_how_to_have_one(run_dir: Path) -> None:
    async with in_process(create_app(settings_without_worker(run_dir))) as client:
        for method, path in (("GET", "/v1/fleet"), ("GET", "/v1/fleet/plans/mimo"), ("DELETE", "/v1/fleet/plans/mimo")):
            assert_problem(await client.request(method, path), "not-supported")
        problem = assert_problem(await client.post("/v1/fleet/plans", json=PLAN), "not-supported")
        assert "--fleet" in problem["detail"]


async def test_a_cluster_that_is_not_there_is_said_and_the_rest_is_served(run_dir: Path) -> None:
    def nobody() -> FleetManager:
        raise DeviceUnavailable("no Ray cluster at head:6379")

    async with in_process(create_app(settings_without_worker(run_dir), join_fleet=nobody)) as client:
        answer = await eventually(lambda: client.get("/v1/fleet"), lambda answer: "head:6379" in answer.text)
        assert_problem(answer, "device-unavailable")
        assert (await client.get("/livez")).status_code == 200


async def test_others_are_served_while_a_plan_is_being_made(run_dir: Path) -> None:
    """Its reservation waits here until another request has been answered."""
    fleet, going_on = small_fleet(), threading.Event()
    app = create_app(settings_without_worker(run_dir), join_fleet=lambda: manager_of(Slow(fleet, going_on)))
    async with in_process(app) as client:
        await joined(client)
        making = asyncio.ensure_future(client.post("/v1/fleet/plans", json=PLAN))
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/v1/fleet")).status_code == 200
        assert not making.done()
        going_on.set()
        assert (await making).status_code == 200


class Slow(MemoryTransport):
    """Admits nobody before it may."""

    def __init__(self, fleet: MemoryTransport, going_on: threading.Event) -> None:
        super().__init__(fleet.nodes_by_name, fleet.rng)
        self._going_on = going_on

    @contextlib.contextmanager
    def admitted(self, nodes: Iterable[str], *, timeout_s: float) -> Iterator[None]:
        assert self._going_on.wait(60)
        with super().admitted(nodes, timeout_s=timeout_s):
            yield


def test_no_server_loads_ray_without_a_fleet() -> None:
    program = "import sys, kvpage, kvpage.fleet, kvpage_server.app; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
