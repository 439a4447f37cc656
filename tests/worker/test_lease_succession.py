"""Leases and the workers that come after: one that died, and one that is replaced while everybody is connected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvpage.errors import Conflict, NotFound, StaleHandle
from kvpage.wire import leasing, messages, succession
from kvpage.wire.channel import header
from kvpage.wire.client import WorkerClient
from support.eventually import until
from support.leased_pools import plan_of
from support.raw_client import RawClient
from support.remote_client import RemoteClient
from support.served_leases import ServedPools

TOKEN = "a token of sixteen bytes or more"
PLAN = plan_of("flat groups", 65)
NUM_BLOCKS = 64


@pytest.fixture
def pool(pools: ServedPools, request: pytest.FixtureRequest) -> Iterator[messages.PoolState]:
    pool = pools.create(PLAN, request.node.name)
    yield pool
    pools.delete(pool.pool_id, force=True)


class Opened(NamedTuple):
    client: WorkerClient
    lease_id: str

    def take(self, count: int, key: int = 0) -> list[int]:
        granted = self.client.ask(
            leasing.TakeStep(lease_id=self.lease_id, allocate={0: count}, key=key), leasing.Granted
        )
        return list(memoryview(granted.ids[0]).cast("I"))

    def held(self) -> list[int]:
        held = self.client.ask(leasing.ListHeld(lease_id=self.lease_id, group=0), leasing.HeldList)
        return list(memoryview(held.ids).cast("I"))


def opened(client: WorkerClient, pool: messages.PoolState, name: str = "engine", **options: float) -> Opened:
    body = leasing.OpenLease(pool_id=pool.pool_id, name=name, token=TOKEN, **options)  # type: ignore[arg-type]
    return Opened(client, client.ask(body, leasing.LeaseOpened).lease_id)


def adopted(client: WorkerClient, pool: messages.PoolState, name: str = "engine") -> Opened:
    body = leasing.AdoptLease(pool_id=pool.pool_id, name=name, token=TOKEN)
    return Opened(client, client.ask(body, leasing.LeaseOpened).lease_id)


def leases(pools: ServedPools, pool: messages.PoolState) -> dict[str, str]:
    """State by name."""
    return {lease.name: lease.state for lease in pools.blocks(pool.pool_id).leases}


# --- after kill -9 ---------------------------------------------------------------------------------------------------


def test_who_lives_keeps_its_blocks_and_who_has_gone_does_not(pools: ServedPools, pool: messages.PoolState) -> None:
    with RemoteClient() as living, RemoteClient() as dying, RemoteClient() as heir:
        held = {}
        for name, remote, keep_s in (("living", living, 0), ("dying", dying, 0), ("willed", heir, 600)):
            remote.do("connect", socket=str(pools.worker.socket_path))
            lease_id = remote.do("open_lease", pool_id=pool.pool_id, name=name, keep_s=keep_s)["lease_id"]
            held[name] = remote.do("allocate", lease_id=lease_id, count=9)["ids"]
        pools.worker.kill()
        for remote in (dying, heir):
            remote.kill()
        pools.kill()
        until(lambda: leases(pools, pool) == {"living": "quarantined", "willed": "kept"})
        assert pools.blocks(pool.pool_id).free_slabs == NUM_BLOCKS - 18
        living.kill()
        until(lambda: leases(pools, pool) == {"willed": "kept"})
        assert pools.blocks(pool.pool_id).free_slabs == NUM_BLOCKS - 9


def test_a_lease_is_adopted_from_a_worker_that_died(pools: ServedPools, pool: messages.PoolState) -> None:
    """The last step is answered as before, and what was reserved is free: nobody was told which blocks it had."""
    with pools.worker.client() as client:
        before = opened(client, pool)
        mine = before.take(9, key=5)
        client.ask(leasing.Reserve(lease_id=before.lease_id, blocks={0: 9}), leasing.Reserved)
        pools.kill()
    assert pools.blocks(pool.pool_id).free_slabs == NUM_BLOCKS - 9
    with pools.worker.client() as client:
        with pytest.raises(StaleHandle):
            Opened(client, before.lease_id).take(1)
        again = adopted(client, pool)
        assert sorted(again.take(9, key=5)) == sorted(mine)
        assert again.held() == sorted(mine)
        assert not set(again.take(9, key=6)) & set(mine)


def test_leases_by_time_go_on_and_end_when_their_time_is_over(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as client:
        long, short = opened(client, pool, "long", ttl_s=60), opened(client, pool, "short", ttl_s=0.05)
        mine = long.take(9)
        short.take(9)
        pools.kill()
    until(lambda: leases(pools, pool) == {"long": "active"})
    with pools.worker.client() as client:
        assert Opened(client, long.lease_id).held() == sorted(mine)
        with pytest.raises(Conflict, match="lease long"):
            client.request(messages.DeletePool(pool_id=pool.pool_id))
        expires_in_s = pools.blocks(pool.pool_id).leases[0].expires_in_s
        assert expires_in_s is not None
        assert expires_in_s < 60  # it was not renewed by the worker's death


def test_requests_of_leases_wait_until_pools_are_handed_over(pools: ServedPools, pool: messages.PoolState) -> None:
    """An answer before could be that there is no such pool."""
    with pools.worker.client() as client:
        mine = opened(client, pool).take(9)
    connected: list[RawClient] = []
    waiting: list[int] = []

    def ask() -> None:
        client = RawClient(pools.worker.socket_path)
        connected.append(client)
        waiting.append(client.send(leasing.AdoptLease(pool_id=pool.pool_id, name="engine", token=TOKEN)))

    pools.kill(before_adoption=ask)
    answer = connected[0].answer(waiting[0]).body
    assert isinstance(answer, leasing.LeaseOpened)
    assert answer.blocks[0] == len(mine)
    connected[0].close()


def test_a_state_that_is_not_sound_costs_leases_only(pools: ServedPools) -> None:
    """The pool is there as before, and so is every other pool."""
    pool, other = pools.create(PLAN, "spoilt"), pools.create(PLAN, "sound")
    with pools.worker.client() as client:
        opened(client, pool).take(9)
        mine = opened(client, other).take(9)
    control_fd = pools.kept_fds(pool.pool_id)[-1]
    offset = int.from_bytes(os.pread(control_fd, 8, 24), "little")
    size_bytes = int.from_bytes(os.pread(control_fd, 8, 32), "little")
    assert os.pwrite(control_fd, b"\xa5" * size_bytes, offset) == size_bytes
    pools.kill()
    with pools.worker.client() as client:
        with pytest.raises(Conflict):
            opened(client, pool)
        with pytest.raises(Conflict):
            client.request(leasing.DescribeBlocks(pool_id=pool.pool_id))
        hold = client.request(messages.Attach(name="spoilt"))
        for fd in hold.fds:
            os.close(fd)
        assert adopted(client, other).held() == sorted(mine)
    until(lambda: not pools.keeper.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).holders)
    pools.delete(pool.pool_id)
    pools.delete(other.pool_id, force=True)
    until(lambda: pools.num_mapped() == 0)


# --- replaced --------------------------------------------------------------------------------------------------------


def test_leases_of_those_who_are_connected_go_on(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as client, RawClient(pools.worker.socket_path) as waiting:
        lease = opened(client, pool)
        mine = lease.take(60, key=3)
        other = waiting.ask(leasing.OpenLease(pool_id=pool.pool_id, name="waiting")).body
        assert isinstance(other, leasing.LeaseOpened)
        late = waiting.send(leasing.TakeStep(lease_id=other.lease_id, allocate={0: 9}, wait_s=3600))
        reading = waiting.send(leasing.ReadEvents(pool_id=pool.pool_id, wait_s=3600))
        waiting.ask(messages.ListPools())
        pools.replace()
        for request_id in (late, reading):
            error = waiting.answer(request_id).error
            assert error is not None
            assert error.code == "draining"
        assert sorted(lease.take(60, key=3)) == sorted(mine)
        assert lease.held() == sorted(mine)
        assert leases(pools, pool) == {"engine": "active", "waiting": "active"}
        with pytest.raises(Conflict, match=r"lease engine.*lease waiting"):
            client.request(messages.DeletePool(pool_id=pool.pool_id))
        lease.take(4)
        client.ask(leasing.CloseLease(lease_id=lease.lease_id), leasing.LeaseClosed)
        assert isinstance(
            waiting.ask(leasing.TakeStep(lease_id=other.lease_id, allocate={0: 64})).body, leasing.Granted
        )
    until(lambda: leases(pools, pool) == {"waiting": "quarantined"})


def test_who_hangs_up_after_a_replacement_is_seen_to_be_gone(pools: ServedPools, pool: messages.PoolState) -> None:
    with RemoteClient() as remote:
        remote.do("connect", socket=str(pools.worker.socket_path))
        lease_id = remote.do("open_lease", pool_id=pool.pool_id, name="engine")["lease_id"]
        remote.do("allocate", lease_id=lease_id, count=9)
        pools.replace()
        remote.kill()
    until(lambda: leases(pools, pool) == {})
    state = pools.keeper.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState)
    assert state.num_holders == 0


def test_a_handover_that_is_taken_back_leaves_leases_as_they_were(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as client:
        lease = opened(client, pool)
        mine = lease.take(9)
        with pools.worker.client(role="api") as taker:
            for fd in taker.request(succession.TakeOver()).fds:
                os.close(fd)
        assert lease.held() == sorted(mine)
        client.ask(leasing.CloseLease(lease_id=lease.lease_id), leasing.LeaseClosed)
        assert pools.blocks(pool.pool_id).free_slabs == NUM_BLOCKS


def test_who_has_handed_over_changes_no_lease_any_more(pools: ServedPools, pool: messages.PoolState) -> None:
    """Not even one whose time is over in the same turn of its loop, which here takes longer than the lease has."""
    before = pools.worker
    with pools.worker.client(), RawClient(pools.worker.socket_path, role="api") as taker:
        bodies: list[messages.RequestBody] = [
            leasing.OpenLease(pool_id=pool.pool_id, name="short", ttl_s=0.01),
            *[leasing.DescribeBlocks(pool_id=pool.pool_id)] * 600,
            succession.TakeOver(),
            succession.TakeConnection(number=0),
            succession.FinishTakeOver(),
        ]
        payloads = [
            messages.encode(messages.RequestFrame(id=1000 + number, ack=999 + number, body=body))
            for number, body in enumerate(bodies)
        ]
        taker.socket.sendall(b"".join(header(len(payload), 0) + payload for payload in payloads))
        assert isinstance(taker.answer(1000).body, leasing.LeaseOpened)
        assert isinstance(taker.answer(999 + len(bodies)).body, succession.TakeOverFinished)
        assert before.wait() == 0
    events = [line for line in before.log().splitlines() if f'"pid": {before.pid},' in line]
    assert any('"handed_over"' in line for line in events)
    assert not any('"lease_ran_out"' in line for line in events)
    pools.kill()
    until(lambda: leases(pools, pool) == {})


def test_draining_waits_for_leases(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as client, RawClient(pools.worker.socket_path, role="api") as asking:
        lease = opened(client, pool)
        draining = asking.send(succession.DrainWorker(timeout_s=0.05))
        error = asking.answer(draining).error
        assert error is not None
        assert "lease engine" in error.message
        draining = asking.send(succession.DrainWorker(timeout_s=600))
        until(lambda: asking.ask(messages.DescribeDevice()).body.state == "draining")  # type: ignore[union-attr]
        lease.take(1)  # who is served goes on
        refused = asking.ask(leasing.OpenLease(pool_id=pool.pool_id, name="late")).error
        assert refused is not None
        assert refused.code == "draining"
        client.ask(leasing.CloseLease(lease_id=lease.lease_id), leasing.LeaseClosed)
        assert isinstance(asking.answer(draining).body, succession.WorkerDrained)
    pools.kill()
    with pytest.raises(NotFound), pools.worker.client() as client:
        adopted(client, pool)
