"""Leases of both clients against a real server, and events that go on through its death."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

import kvpage
from kvpage.client.block_resources import ContentEvent, PoolEvent
from kvpage.client.events import Event
from kvpage.client.http import Client
from kvpage.client.resources import Pool
from kvpage.errors import (
    Conflict,
    DeviceUnavailable,
    NotFound,
    OutOfBlocks,
    PermissionDenied,
    PoolNotFound,
    ProtocolError,
    SpecInvalid,
    StaleHandle,
    WorkerLost,
)
from kvpage.pages.steps import Step
from support.api_service import ApiService, kill_process
from support.eventually import until
from support.leaks import leak_guard
from support.plan_requests import small_request

pytestmark = pytest.mark.usefixtures("no_leaks")

HASH = bytes(range(16))


@pytest.fixture(scope="module")
def service() -> Iterator[ApiService]:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB") as service:
            yield service


@pytest.fixture
def client(service: ApiService) -> Iterator[Client]:
    with service.client() as client:
        yield client
        for pool in client.pools():
            client.delete_pool(pool.id, force=True)


@pytest.fixture
def pool(client: Client) -> Pool:
    return client.create_pool(small_request(), name="mimo")


def test_a_lease_does_what_leases_do(client: Client, pool: Pool) -> None:
    with client.create_lease(pool.id, name="a", tenant="team", ttl_s=40) as lease:
        blocks = lease.allocate_all({0: 3, 2: 1})
        run = lease.allocate_run(1, 2)
        assert np.diff(run).tolist() == [1]
        for group, ids in ((0, blocks[0][:1]), (1, run[:1]), (2, blocks[2])):
            lease.commit(group, ids, [HASH])
        lease.free(0, blocks[0][1:])
        assert {group: held.ids.tolist() for group, held in lease.held().items()} == {
            0: blocks[0][:1].tolist(), 1: sorted(run.tolist()), 2: blocks[2].tolist(),
        }  # fmt: skip
        found = lease.find_prefix([[HASH]] * 3, 16)
        assert found.num_tokens == lease.take_prefix([[HASH]] * 3, 16).num_tokens == 16
        assert lease.held()[0].times.tolist() == [2]
        reservation = lease.reserve({0: 4})
        assert len(reservation.commit({0: 1}).ids[0]) == 1
        reservation.give_back()
        assert (lease.renew(), len(lease.salt), lease.state().tenant) == (40, 16, "team")
        [shown] = client.leases(pool.id)
        assert (shown.name, shown.blocks, shown.reserved) == ("a", [2, 2, 1], [0, 0, 0])
        assert lease.token not in repr(lease)
    assert lease.closed
    lease.close()
    assert client.leases(pool.id) == []
    with pytest.raises(StaleHandle):
        lease.renew()


def test_what_is_refused_is_the_error_it_names(client: Client, pool: Pool) -> None:
    lease = client.create_lease(pool.id, name="a")
    for kind, work in (
        (OutOfBlocks, lambda: lease.allocate(0, 1000)),
        (Conflict, lambda: lease.free(0, [5])),
        (SpecInvalid, lambda: lease.free(0, [-1])),
        (Conflict, lambda: client.create_lease(pool.id, name="a")),
        (SpecInvalid, lambda: client.create_lease(pool.id, name="b", ttl_s=61)),
        (PoolNotFound, lambda: client.create_lease("pool-" + "0" * 16, name="b")),
        (NotFound, lambda: client.adopt_lease(pool.id, name="b", token=lease.token)),
        (PermissionDenied, lambda: client.adopt_lease(pool.id, name="a", token="not-the-right-one")),
    ):
        with pytest.raises(kind):
            work()
    assert lease.held() == {}


def test_who_adopts_a_lease_fences_its_owner(client: Client, pool: Pool) -> None:
    old = client.create_lease(pool.id, name="a")
    ids = old.allocate(0, 3)
    new = client.adopt_lease(pool.id, name="a", token=old.token, generation=old.generation)
    assert new.held()[0].ids.tolist() == sorted(ids.tolist())
    assert (new.generation, list(new.num_blocks)) == (2, [3, 0, 0])
    with pytest.raises(StaleHandle):
        old.allocate(0, 1)
    old.close()  # which gives nothing back
    assert len(new.held()[0].ids) == 3


def test_a_lease_goes_on_when_its_worker_and_its_server_are_replaced(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir) as service, service.client() as client:
        pool = client.create_pool(small_request(), name="mimo")
        lease = client.create_lease(pool.id, name="a", ttl_s=60)
        step = Step(key=lease.new_key(), allocate={0: 2})
        ids = lease.step(step).ids[0].tolist()
        kill_process(service.worker_pid())
        assert sorted(lease.step(step).ids[0].tolist()) == sorted(ids)
        with ThreadPoolExecutor(1) as threads:  # one who waits goes on to wait at the next worker
            waiting = threads.submit(wait_for_blocks, service, pool)
            until(lambda: num_waiting(client, pool) == 1)
            kill_process(service.worker_pid())
            until(lambda: num_waiting(client, pool) == 1)
            lease.free(0, ids)
            assert waiting.result(60) == 66
            ids = lease.step(step := Step(key=lease.new_key(), allocate={0: 2})).ids[0].tolist()
        service.kill()
        with ApiService(run_dir):
            assert sorted(lease.step(step).ids[0].tolist()) == sorted(ids)
            lease.free(0, ids)
            lease.close()


def wait_for_blocks(service: ApiService, pool: Pool) -> int:
    """How many blocks another lease was given, which are more than there were."""
    with service.client() as client, client.create_lease(pool.id, name="waiter", ttl_s=60) as lease:
        return len(lease.allocate(0, 66, wait_s=60))


def num_waiting(client: Client, pool: Pool) -> int:
    try:
        blocks = client.get_pool(pool.id).blocks
    except WorkerLost:
        return 0
    return 0 if blocks is None else sum(tenant.num_waiting for tenant in blocks.tenants)


def test_tenants_and_contents(client: Client, pool: Pool) -> None:
    assert client.set_tenant(pool.id, "a/b", quota_bytes=1, priority=2, weight=3).weight == 3
    assert [tenant.name for tenant in client.tenants(pool.id)] == ["a/b"]
    lease = client.create_lease(pool.id, name="a")
    lease.commit(0, lease.allocate(0, 1), [HASH])
    page = client.contents(pool.id, 0)
    assert (page.hashes, page.next_page_token) == ([HASH.hex()], None)
    client.clear_prefixes(pool.id)
    assert client.contents(pool.id, 0).hashes == []
    blocks = client.get_pool(pool.id).blocks
    assert blocks is not None
    assert (blocks.num_leases, blocks.groups[0].leased) == (1, 1)
    assert client.find_pool("mimo").blocks is None


def test_the_same_to_be_awaited(service: ApiService, pool: Pool) -> None:
    async def use() -> None:
        async with kvpage.AsyncClient(run_dir=str(service.run_directory.path)) as client:
            async with await client.create_lease(pool.id, name="a") as lease:
                ids = (await lease.step(Step(allocate={0: 3}))).ids[0]
                await lease.step(Step(commit={}, free={0: ids[:1]}))
                assert (await lease.held(0)).ids.tolist() == sorted(ids[1:].tolist())
                more = await lease.allocate_all({0: 1, 1: 2})
                await lease.retain(0, more[0])
                await lease.commit(0, more[0], [HASH])
                for group, blocks in (*more.items(), (0, more[0])):
                    await lease.free(group, blocks)
                run = await lease.allocate_run(0, 2)
                assert run[1] == run[0] + 1
                await lease.free(0, run)
                assert len(await lease.allocate(1, 0)) == 0
                await client.clear_prefixes(pool.id)
                reserved = await lease.reserve({1: 2})
                assert len((await lease.commit_reservation(reserved, {1: 1})).ids[1]) == 1
                await lease.end_reservation(reserved)
                assert (await lease.find_prefix([[HASH]] * 3, 16)).num_tokens == 0
                assert (await lease.take_prefix([[HASH]] * 3, 16)).num_tokens == 0
                assert (await lease.renew(), (await lease.state()).name) == (30, "a")
                adopted = await client.adopt_lease(pool.id, name="a", token=lease.token)
                assert adopted.generation == 2
                with pytest.raises(StaleHandle):
                    await lease.renew()
            assert [state.name for state in await client.leases(pool.id)] == ["a"]
            async for event in client.events(pool.id):
                assert isinstance(event.data, PoolEvent)
                break
            await adopted.close()
            with pytest.raises(StaleHandle):
                await adopted.renew()
            assert await client.tenants(pool.id) == []
            assert (await client.contents(pool.id, 0)).hashes == []
            assert (await client.set_tenant(pool.id, "a")).name == "a"
            await client.clear_prefixes(pool.id)

    asyncio.run(use())


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_go_on_when_the_server_is_replaced(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir, "--leave-workers") as service, service.client() as client:
        pool = client.create_pool(small_request(), name="mimo")
        lease = client.create_lease(pool.id, name="a", ttl_s=60)
        told = client.events(pool.id)
        assert next(told).kind == "pool"
        lease.commit(0, lease.allocate(0, 1), [HASH])
        first = next(told)
        assert service.terminate() == -signal.SIGTERM
        with ApiService(run_dir):
            lease.commit(0, lease.allocate(0, 1), [b"sixteen bytes !!"])
            later = [next(told), next(told)]
            assert numbers([first, *later]) == [1, 2]
            client.delete_pool(pool.id, force=True)
            assert [event.data.state for event in told if isinstance(event.data, PoolEvent)][-1] == "deleted"
    with kvpage.Client(run_dir=str(run_dir), timeout_s=0.05) as impatient, pytest.raises(DeviceUnavailable):
        next(impatient.events())


def numbers(events: list[Event]) -> list[int]:
    return [event.data.number for event in events if isinstance(event.data, ContentEvent)]


def test_events_of_a_pool_that_is_not_there(client: Client) -> None:
    with pytest.raises(PoolNotFound):
        next(client.events("pool-" + "0" * 16))


@pytest.mark.parametrize(
    "text",
    ["event: stored\nid: a\ndata: {}\n\n", "event: other\nid: a\ndata: {}\n\n", "event: pool\n\n", "event: \udcff\n\n"],
)
def test_what_is_no_event_is_refused(text: str) -> None:
    answer = httpx.Response(200, content=text.encode(errors="surrogateescape"))
    with kvpage.Client("http://test", transport=httpx.MockTransport(lambda _: answer)) as client:
        with pytest.raises(ProtocolError):
            next(client.events())
