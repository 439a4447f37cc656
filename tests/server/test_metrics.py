"""GET /metrics: what it says is documented, is what was leased, adds up, and is said whatever the workers do."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client import Metric, generate_latest
from starlette.types import Receive, Scope, Send

import kvpage
from kvpage.client.resources import Device
from kvpage.client.socket_lease import SocketLease
from kvpage.errors import OutOfBlocks, PoolNotFound
from kvpage.wire import leasing
from kvpage.wire.client import WorkerClient
from kvpage.wire.leasing import BlocksState, GroupBlocks, Latency, TenantState
from kvpage.wire.messages import PoolState
from kvpage_server.app import create_app
from kvpage_server.device_pools import DevicePools
from kvpage_server.metrics import CountRequests, ServiceMetrics, as_text
from kvpage_server.metrics_reading import DeviceReader, DeviceReading, PoolReading
from kvpage_server.metrics_samples import MAX_POOLS_NAMED, MAX_TENANTS_NAMED, Named
from kvpage_server.metrics_state import StateMetrics
from support.api_in_process import in_process, settings_without_worker
from support.api_service import ApiService
from support.checkout import ROOT
from support.eventually import until
from support.leased_pools import BLOCKS_PER_SLAB, LAYERS, content
from support.metric_samples import Scraped, conservation_faults
from support.plan_requests import small_request
from support.token_files import token_file

CUTS = BLOCKS_PER_SLAB["three"]
NUM_SLABS = 9
REQUEST = {
    "layers": LAYERS["three"], "strategy": "nested", "allocator": "slabs", "num_blocks": NUM_SLABS,
    "max_model_len": 16, "max_num_batched_tokens": 16,
}  # fmt: skip
ROW = re.compile(r"^\| `(kvpage_\w+)` \| (\w+) \| ([\w, ]*?) ?\| (.+?) \|$", re.MULTILINE)


class Served:
    """A server with a pool named mimo."""

    def __init__(self, service: ApiService) -> None:
        self.service = service
        self.run_dir = str(service.run_directory.path)
        transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket))
        self._http = httpx.Client(transport=transport, base_url="http://kvpage", timeout=60)
        with service.client() as client:
            self.slab_bytes = client.plan(REQUEST).bytes_per_block
            self.pool_id = client.create_pool(REQUEST, name="mimo").id

    def scrape(self) -> Scraped:
        answer = self._http.get("/metrics")
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        return Scraped(answer.text)

    def lease(self, name: str, tenant: str = "") -> SocketLease:
        return kvpage.open_lease("mimo", name=name, tenant=tenant, run_dir=self.run_dir)

    def worker(self) -> WorkerClient:
        return WorkerClient(self.service.run_directory.worker_socket("host"), role="api")

    def faults(self, scraped: Scraped) -> list[str]:
        return list(conservation_faults(scraped, "mimo", CUTS, self.slab_bytes))

    def close(self) -> None:
        self._http.close()
        with self.service.client() as client:
            client.delete_pool(self.pool_id, wait_s=30)


@pytest.fixture
def served(shared_service: ApiService) -> Iterator[Served]:
    served = Served(shared_service)
    yield served
    served.close()


# --- the page ---------------------------------------------------------------------------------------------------------


def documented(page: str) -> dict[str, tuple[str, set[str]]]:
    """Kind and labels by name."""
    return {name: (kind, set(filter(None, labels.split(", ")))) for name, kind, labels, _ in ROW.findall(page)}


def said(scraped: Scraped) -> dict[str, tuple[str, set[str]]]:
    return {
        name: (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
        for name, family in scraped.families.items()
    }


def test_the_page_has_every_metric_with_its_kind_and_labels_and_no_other(served: Served) -> None:
    with served.worker() as worker, served.lease("engine", "acme") as lease, served.service.client() as client:
        worker.ask(
            leasing.SetTenants(
                pool_id=served.pool_id, tenants=[leasing.TenantSettings(name="acme", quota_bytes=1 << 20)]
            ),
            leasing.TenantsSet,
        )
        lease.allocate(0, 1)
        client.plan(small_request())
        with pytest.raises(PoolNotFound):
            client.get_pool("pool-0123456789abcdef")
        served.scrape()  # the first request that is counted may be this one
        assert said(served.scrape()) == documented((ROOT / "docs/metrics.md").read_text())


def test_the_reader_of_the_page_sees_every_row() -> None:
    page = "| `kvpage_a` | gauge | x, y | one |\n| `kvpage_b_total` | counter | | two |\n| `c` | gauge | | no |\n"
    assert documented(page) == {"kvpage_a": ("gauge", {"x", "y"}), "kvpage_b_total": ("counter", set())}


def test_a_unit_is_the_end_of_a_name() -> None:
    for name in documented((ROOT / "docs/metrics.md").read_text()):
        bare = name.removesuffix("_total")
        assert not re.search(r"_(s|ms|gib|mib|size|time)$", bare), name
        assert "_bytes" not in bare or bare.endswith("_bytes"), name


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_what_is_leased_is_what_is_said(served: Served) -> None:
    with served.lease("engine", "acme") as one, served.lease("other", "free") as other:
        ids = one.allocate_all({0: 2, 1: 5})
        other.allocate(2, 3)
        one.commit(1, ids[1][:2], [content(1), content(2)])
        one.free(1, ids[1][:1])
        scraped = served.scrape()
        assert [scraped.by("kvpage_blocks", "state", pool="mimo", group=str(group)) for group in range(3)] == [
            {"used": 2, "cached": 0, "free": 0},
            {"used": 4, "cached": 1, "free": 3},
            {"used": 3, "cached": 0, "free": 1},
        ]
        assert scraped.by("kvpage_group_slabs", "group", pool="mimo") == {"0": 2, "1": 2, "2": 2}
        assert scraped.by("kvpage_slabs", "state", pool="mimo") == {"used": 6, "idle": 0, "free": 2, "null": 1}
        assert scraped.by("kvpage_fragmentation_ratio", "group", pool="mimo") == {"0": 0, "1": 3 / 8, "2": 1 / 4}
        assert scraped.by("kvpage_leased_blocks", "state", pool="mimo") == {"active": 9, "quarantined": 0}
        assert scraped.by("kvpage_leases", "state", pool="mimo") == {"active": 2, "quarantined": 0, "kept": 0}
        slab = served.slab_bytes
        used = {"acme": 2 * slab + 4 * slab // CUTS[1], "free": 3 * slab // CUTS[2]}
        assert scraped.by("kvpage_tenant_used_bytes", "tenant", pool="mimo") == used
        assert scraped.by("kvpage_block_bytes", "state", pool="mimo")["used"] == sum(used.values())
        assert scraped.value("kvpage_prefix_blocks", pool="mimo") == 2
        assert scraped.value("kvpage_prefix_stored_blocks_total", pool="mimo") == 2
        assert scraped.value("kvpage_pool_holders", pool="mimo") == 2
        assert scraped.value("kvpage_step_duration_seconds_count", pool="mimo") == 4
        assert scraped.by("kvpage_allocated_blocks_total", "group", pool="mimo") == {"0": 2, "1": 5, "2": 3}
        assert scraped.value("kvpage_leases_opened_total", pool="mimo") == 2
        assert served.faults(scraped) == []


@pytest.mark.parametrize(
    ("said", "instead"),
    [
        (r'(kvpage_blocks\{device="host",group="1",pool="mimo",state="used"\}) .*', r"\1 6.0"),
        (r'(kvpage_blocks\{device="host",group="0",pool="mimo",state="free"\}) .*', r"\1 -1.0"),
        (r'(kvpage_group_slabs\{device="host",group="2",pool="mimo"\}) .*', r"\1 1.0"),
        (r'(kvpage_slabs\{device="host",pool="mimo",state="free"\}) .*', r"\1 9.0"),
        (r'(kvpage_slabs\{device="host",pool="mimo",state="null"\}) .*', r"\1 2.0"),
        (r'(kvpage_slab_bytes\{device="host",pool="mimo",state="used"\}) .*', r"\1 0.0"),
        (r'(kvpage_leased_blocks\{device="host",group="1",pool="mimo",state="active"\}) .*', r"\1 4.0"),
        (r'(kvpage_available_blocks\{device="host",group="1",pool="mimo"\}) .*', r"\1 2.0"),
    ],
)
def test_the_conservation_check_fires(served: Served, said: str, instead: str) -> None:
    with served.lease("engine") as lease:
        lease.allocate_all({0: 2, 1: 5})
        scraped = served.scrape()
    assert served.faults(scraped) == []
    changed, num_changed = re.subn(said, instead, scraped.text)
    assert num_changed == 1
    assert served.faults(Scraped(changed))


def test_conservation_holds_while_engines_churn(served: Served) -> None:
    ended = threading.Event()

    def churn() -> None:
        with served.lease("engine") as lease:
            number = 0
            while not ended.is_set():
                ids = lease.allocate_all({0: 2, 1: 5, 2: 1})
                lease.commit(1, ids[1][:1], [content(number := number + 1)])
                for group, some in ids.items():
                    lease.free(group, some)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        seen = [served.scrape() for _ in range(30)]
    finally:
        ended.set()
        thread.join()
    assert [fault for scraped in seen for fault in served.faults(scraped)] == []
    counts = [scraped.value("kvpage_step_duration_seconds_count", pool="mimo") for scraped in seen]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_blocks_of_an_owner_that_let_go_without_a_word_are_quarantined(served: Served) -> None:
    with served.worker() as engine:
        opened = engine.ask(leasing.OpenLease(pool_id=served.pool_id, name="engine"), leasing.LeaseOpened)
        engine.ask(leasing.TakeStep(lease_id=opened.lease_id, key=1, allocate={1: 5}), leasing.Granted)

    def quarantined() -> Scraped | None:
        scraped = served.scrape()
        return scraped if scraped.value("kvpage_leases", pool="mimo", state="quarantined") else None

    scraped = until(quarantined)
    leased = {
        state: scraped.sum("kvpage_leased_blocks", pool="mimo", state=state) for state in ("active", "quarantined")
    }
    assert leased == {"active": 0, "quarantined": 5}
    assert scraped.sum("kvpage_blocks", pool="mimo", state="used") == 5
    with kvpage.adopt_lease("mimo", name="engine", token=str(opened.token), run_dir=served.run_dir):
        assert served.scrape().by("kvpage_leases", "state", pool="mimo") == {"active": 1, "quarantined": 0, "kept": 0}


def test_blocks_are_counted_when_they_are_handed_out_and_leases_when_they_are_opened(served: Served) -> None:
    def counted() -> tuple[dict[str, float], float]:
        scraped = served.scrape()
        allocated = scraped.by("kvpage_allocated_blocks_total", "group", pool="mimo")
        return allocated, scraped.value("kvpage_leases_opened_total", pool="mimo")

    with served.lease("engine") as lease:
        [block] = lease.allocate(0, 1)
        with pytest.raises(OutOfBlocks):
            lease.allocate(0, 99)
        with lease.reserve({1: 3}) as reservation:
            reservation.commit({1: 2})
        lease.free(0, [block])
        assert counted() == ({"0": 1, "1": 3, "2": 0}, 1)
        with kvpage.adopt_lease("mimo", name="engine", token=lease.token, run_dir=served.run_dir):
            assert counted()[1] == 1
    with served.lease("engine"):
        assert counted() == ({"0": 1, "1": 3, "2": 0}, 2)


def test_padding_is_what_of_a_block_no_layer_fills(served: Served) -> None:
    plan = kvpage.plan(REQUEST)
    with served.lease("engine") as lease:
        lease.allocate_all({0: 2, 1: 5})
        scraped = served.scrape()
    for number, group in enumerate(plan.groups):
        data_bytes = sum(plan.layers[name].real_page_size_bytes for name in group.layers)
        share = 1 - data_bytes * group.blocks_per_slab / plan.slab_bytes
        for state, held_bytes in scraped.by("kvpage_block_bytes", "state", pool="mimo", group=str(number)).items():
            padding_bytes = scraped.value("kvpage_block_padding_bytes", pool="mimo", group=str(number), state=state)
            assert padding_bytes == held_bytes * share


def test_who_waits_is_counted_and_so_is_what_became_of_it(served: Served) -> None:
    def waiting() -> bool:
        return served.scrape().value("kvpage_admission_waiting", pool="mimo", tenant="late") == 1

    with served.lease("late", "late") as late:
        with served.lease("early") as early:
            early.allocate(0, NUM_SLABS - 1)
            with pytest.raises(OutOfBlocks):
                late.allocate(0, 1, wait_s=0.01)
            thread = threading.Thread(target=late.allocate, args=(0, 1), kwargs={"wait_s": 60.0})
            thread.start()
            until(waiting)
        thread.join()
        scraped = served.scrape()
        outcomes = scraped.by("kvpage_admission_waits_total", "outcome", pool="mimo", tenant="late")
        assert outcomes == {"served": 1, "given_up": 1, "failed": 0}
        assert scraped.value("kvpage_admission_waiting", pool="mimo", tenant="late") == 0
        assert scraped.value("kvpage_admission_wait_seconds_total", pool="mimo", tenant="late") >= 0.01


# --- workers ----------------------------------------------------------------------------------------------------------


def test_a_killed_worker_makes_nothing_fail_and_its_successor_is_counted(service: ApiService) -> None:
    served = Served(service)
    with served.lease("engine") as lease:
        lease.allocate(1, 5)
        before = served.scrape()
        assert before.value("kvpage_device_ready", device="host") == 1
        assert before.value("kvpage_device_workers_total", device="host") == 1
        os.kill(service.worker_pid(), signal.SIGKILL)

        def back() -> Scraped | None:
            scraped = served.scrape()
            assert scraped.value("kvpage_pool_buffer_bytes", pool="mimo") == NUM_SLABS * served.slab_bytes
            is_back = scraped.all("kvpage_blocks") and scraped.value("kvpage_device_workers_total") == 2
            return scraped if is_back else None

        scraped = until(back)
        assert scraped.value("kvpage_device_ready", device="host") == 1
        assert scraped.sum("kvpage_blocks", pool="mimo", state="used") == 5
        assert served.faults(scraped) == []
    served.close()


def test_a_worker_that_hangs_is_not_ready_and_holds_nobody_up(service: ApiService) -> None:
    served = Served(service)
    pid = service.worker_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        scraped = served.scrape()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert scraped.value("kvpage_device_ready", device="host") == 0
    assert scraped.all("kvpage_blocks") == {}
    assert scraped.all("kvpage_device_free_bytes") == {}
    assert scraped.value("kvpage_pool_state", pool="mimo", state="ready") == 1
    until(lambda: served.scrape().value("kvpage_device_ready", device="host") == 1)
    served.close()


class Hanging:
    """A device whose worker answers when it is let."""

    device = "host"
    held = ()

    def __init__(self) -> None:
        self.link = self
        self.num_workers = 1
        self.num_asked = self.num_asking = 0
        self.answers = asyncio.Event()

    async def describe(self) -> Device:
        self.num_asked += 1
        self.num_asking += 1
        try:
            await self.answers.wait()
        finally:
            self.num_asking -= 1
        return Device(
            device="host", state="ready", handle_kinds=[], epoch="e", worker_pid=1, memory_limit_bytes=1,
            reserved_bytes=0, num_pools=0,
        )  # fmt: skip

    async def states(self) -> list[PoolState]:
        return []


@pytest.mark.anyio
async def test_however_often_a_worker_that_hangs_is_read_it_is_asked_once() -> None:
    hanging = Hanging()
    reader = DeviceReader(cast(DevicePools, hanging), read_s=0.01)
    readings = await asyncio.gather(*(reader.read() for _ in range(20)))
    assert [reading.is_ready for reading in readings] == [False] * 20
    assert hanging.num_asked == 1
    hanging.answers.set()
    while not (await reader.read()).is_ready:
        pass
    await reader.close()


@pytest.mark.anyio
async def test_a_reader_that_is_closed_asks_no_more() -> None:
    hanging = Hanging()
    reader = DeviceReader(cast(DevicePools, hanging), read_s=0.0)
    await reader.read()
    assert hanging.num_asking == 1
    await reader.close()
    assert hanging.num_asking == 0


@pytest.mark.anyio
async def test_without_a_worker_there_is_an_answer(api: httpx.AsyncClient) -> None:
    scraped = Scraped((await api.get("/metrics")).text)
    assert scraped.value("kvpage_device_ready", device="host", device_uuid="") == 0
    assert scraped.value("kvpage_device_workers_total", device="host") == 0


# --- how many series there are ----------------------------------------------------------------------------------------


def reading(num_pools: int, tenants: list[str], *, first: int = 0) -> DeviceReading:
    """Pools with one block used, each with these tenants, who use one byte each."""
    pools = tuple(pool_reading(f"pool-{number}", tenants) for number in range(first, first + num_pools))
    return DeviceReading(device=None, name="host", device_uuid="", num_workers=1, pools=pools)


def pool_reading(name: str, tenants: list[str]) -> PoolReading:
    state = PoolState(
        pool_id="pool-0123456789abcdef", name=name, device="host", epoch="0" * 32, plan_id="sha256:" + "0" * 64,
        state="ready", buffer_size_bytes=4096, committed_bytes=4096, num_holders=1, holders=[],
    )  # fmt: skip
    group = GroupBlocks(
        used=1, cached=1, free=2, slabs=1, available=3, leased=1, quarantined=0, block_bytes=1024
    )  # fmt: skip
    blocks = BlocksState(
        pool_id=state.pool_id, num_slabs=1, free_slabs=0, idle_slabs=0, slab_bytes=4096, groups=[group],
        tenants=[tenant_state(tenant) for tenant in tenants], num_leases=1, leases_by_state={"active": 1}, leases=[],
        prefix=None, steps=Latency(bounds_s=[0.1, 1.0], counts=[1, 2, 3], sum_s=10.0),
    )  # fmt: skip
    return PoolReading(state=state, blocks=blocks)


def tenant_state(name: str) -> TenantState:
    return TenantState(
        name=name, quota_bytes=10, priority=0, weight=1, used_bytes=1, num_leases=1, num_waiting=1, num_waited=4,
        num_served=1, num_given_up=1, waited_s=0.5,
    )  # fmt: skip


def scraped_from(families: Iterator[Metric]) -> Scraped:
    return Scraped(as_text(families).decode())


def test_pools_beyond_the_limit_are_added_up() -> None:
    metrics = StateMetrics()
    scraped = scraped_from(metrics.families([reading(MAX_POOLS_NAMED + 44, ["a"])]))
    buffers = scraped.by("kvpage_pool_buffer_bytes", "pool")
    assert len(buffers) == MAX_POOLS_NAMED + 1
    assert buffers["other"] == 44 * 4096
    assert scraped.value("kvpage_pool_state", pool="other", state="ready") == 44
    assert scraped.by("kvpage_blocks", "state", pool="other") == {"used": 44, "cached": 44, "free": 88}
    assert scraped.value("kvpage_fragmentation_ratio", pool="other") == 0.5
    assert scraped.value("kvpage_step_duration_seconds_count", pool="other") == 44 * 6
    assert scraped.value("kvpage_step_duration_seconds_sum", pool="other") == 440
    assert scraped.by("kvpage_step_duration_seconds_bucket", "le", pool="other") == {"0.1": 44, "1.0": 132, "+Inf": 264}


def test_tenants_beyond_the_limit_are_added_up_and_have_no_quota() -> None:
    tenants = [f"tenant-{number}" for number in range(MAX_TENANTS_NAMED + 50)]
    scraped = scraped_from(StateMetrics().families([reading(2, tenants)]))
    used = scraped.by("kvpage_tenant_used_bytes", "tenant", pool="pool-0")
    assert len(used) == MAX_TENANTS_NAMED + 1
    assert used["other"] == 50
    assert "other" not in scraped.by("kvpage_tenant_quota_bytes", "tenant")
    outcomes = scraped.by("kvpage_admission_waits_total", "outcome", pool="pool-1", tenant="other")
    assert outcomes == {"served": 50, "given_up": 50, "failed": 50}


def test_one_that_is_really_called_other_is_among_the_others() -> None:
    scraped = scraped_from(StateMetrics().families([reading(1, ["other", "a", *map(str, range(MAX_TENANTS_NAMED))])]))
    assert scraped.value("kvpage_tenant_used_bytes", tenant="other") == 3


def test_names_stay_as_long_as_what_they_name() -> None:
    named = Named(2)
    named.keep([("host", "a"), ("host", "b")])
    named.keep([("host", "new"), ("host", "b"), ("host", "a")])
    assert [named.label("host", name) for name in ("a", "b", "new")] == ["a", "b", "other"]
    named.keep([("host", "new"), ("host", "b")])
    assert [named.label("host", name) for name in ("a", "b", "new")] == ["other", "b", "new"]


def test_two_pools_of_one_name_are_one_series() -> None:
    both = [reading(1, []), reading(1, [])]
    assert scraped_from(StateMetrics().families(both)).value("kvpage_pool_buffer_bytes", pool="pool-0") == 8192


def test_names_with_odd_characters_are_told_as_they_are() -> None:
    odd = 'a"b\\c\nd{}'
    scraped = scraped_from(StateMetrics().families([reading(1, [odd])]))
    assert scraped.by("kvpage_tenant_used_bytes", "tenant") == {odd: 1}


# --- HTTP and planning ------------------------------------------------------------------------------------------------


async def requests_of(api: httpx.AsyncClient) -> dict[tuple[str, str, str], float]:
    series = Scraped((await api.get("/metrics")).text).all("kvpage_http_requests_total")
    named = ((dict(key), value) for key, value in series.items())
    return {(labels["method"], labels["route"], labels["status"]): value for labels, value in named}


@pytest.mark.anyio
async def test_requests_are_counted_by_route_and_not_by_path(api: httpx.AsyncClient) -> None:
    plan_id = (await api.post("/v1/plans", json=small_request())).json()["plan_id"]
    await api.post("/v1/plans", json=small_request())
    await api.get(f"/v1/plans/{plan_id}")
    await api.get("/v1/plans/sha256:00")
    for number in range(50):
        await api.get(f"/v1/pools/pool-{number:016x}")
        await api.get(f"/nothing/{number}")
    await api.request("DELETE", "/livez")
    await api.request("BREW", "/livez")
    assert await requests_of(api) == {
        ("POST", "/v1/plans", "201"): 1, ("POST", "/v1/plans", "200"): 1, ("GET", "/v1/plans/{plan_id}", "200"): 1,
        ("GET", "/v1/plans/{plan_id}", "404"): 1, ("GET", "/v1/pools/{pool_id}", "503"): 50, ("GET", "none", "404"): 50,
        ("DELETE", "/livez", "405"): 1, ("other", "/livez", "405"): 1,
    }  # fmt: skip


@pytest.mark.anyio
async def test_errors_are_counted_by_their_code(api: httpx.AsyncClient) -> None:
    await api.post("/v1/plans", json={"layers": []})
    await api.get("/v1/pools/pool-0123456789abcdef")
    await api.get("/nowhere")
    await api.get("/livez")
    scraped = Scraped((await api.get("/metrics")).text)
    counted = scraped.all("kvpage_http_errors_total")
    assert {tuple(sorted(dict(labels).items())) for labels in counted} >= {
        (("code", "spec-invalid"), ("route", "/v1/plans")),
        (("code", "not-found"), ("route", "none")),
    }
    statuses = scraped.by("kvpage_http_requests_total", "status")
    assert sum(counted.values()) == sum(value for status, value in statuses.items() if int(status) >= 400) == 3


@pytest.mark.anyio
async def test_who_may_not_is_counted_too(api_over_tcp: httpx.AsyncClient, run_dir: Path) -> None:
    token = "0123456789abcdef0123456789abcdef"
    app = create_app(settings_without_worker(run_dir, token_file=token_file(run_dir, token)))
    async with in_process(app, caller=None) as client:
        assert (await client.get("/metrics")).status_code == 401
        client.headers["Authorization"] = f"Bearer {token}"
        assert await requests_of(client) == {("GET", "none", "401"): 1}
    assert (await api_over_tcp.get("/metrics")).status_code == 403


@pytest.mark.anyio
async def test_durations_and_plans_are_measured_and_what_is_in_the_cache_is_no_plan(api: httpx.AsyncClient) -> None:
    for _ in range(3):
        await api.post("/v1/plans", json=small_request())
    scraped = Scraped((await api.get("/metrics")).text)
    assert scraped.value("kvpage_plan_duration_seconds_count") == 1
    assert scraped.value("kvpage_plan_duration_seconds_sum") > 0
    assert scraped.value("kvpage_http_request_duration_seconds_count", route="/v1/plans") == 3
    assert scraped.value("kvpage_build_info", version=kvpage.__version__) == 1


@pytest.mark.anyio
async def test_an_answer_that_goes_on_is_counted_when_it_begins() -> None:
    metrics = ServiceMetrics()
    counted = []

    async def holding(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        counted.append(generate_latest(metrics.registry).decode())

    async def nothing(*_: object) -> Any:
        return {}

    scope = {"type": "http", "method": "GET", "path": "/v1/pools/pool-00/hold"}
    await CountRequests(holding, metrics)(scope, nothing, nothing)
    assert Scraped(counted[0]).value("kvpage_http_requests_total", status="200") == 1
