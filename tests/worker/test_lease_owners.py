"""Whose leases are, and what becomes of their blocks when their owners let go, die, or are not to be seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpage.errors import Conflict, NotFound, OutOfBlocks, PermissionDenied, StaleHandle
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease
from kvpage.wire import leasing, messages
from kvpage_server.lease_owners import Departure, born, pidfd_by_number
from kvpage_server.worker_loop import Loop
from support.eventually import until
from support.leased_pools import plan_of
from support.raw_client import RawClient
from support.remote_client import RemoteClient
from support.served_leases import ServedPools
from support.worker_thread import WorkerThread

TOKEN = "a token of sixteen bytes or more"
PLAN = plan_of("flat groups", 65)
NUM_BLOCKS = 64


@pytest.fixture
def pool(pools: ServedPools, request: pytest.FixtureRequest) -> Iterator[messages.PoolState]:
    """Deleted at the end, by force if need be; the worker is left as it was found."""
    pools.keeper.request(messages.ListPools())
    num_fds = pools.worker.num_fds()
    pool = pools.create(PLAN, request.node.name)
    yield pool
    pools.delete(pool.pool_id, force=True)
    assert pools.worker.settles_at(num_fds, pools.keeper), "descriptors are left"
    assert pools.num_mapped() == 0


def remote(pools: ServedPools, pool: messages.PoolState, name: str = "engine", **options: object) -> RemoteClient:
    client = RemoteClient()
    client.do("connect", socket=str(pools.worker.socket_path), name="remote")
    client.lease = client.do("open_lease", pool_id=pool.pool_id, name=name, token=TOKEN, **options)["lease_id"]  # type: ignore[attr-defined]
    return client


def take(client: RemoteClient, count: int) -> list[int]:
    ids: list[int] = client.do("allocate", lease_id=client.lease, count=count)["ids"]  # type: ignore[attr-defined]
    return ids


def leases(pools: ServedPools, pool: messages.PoolState) -> dict[str, str]:
    """State by name."""
    return {lease.name: lease.state for lease in pools.blocks(pool.pool_id).leases}


def num_free(pools: ServedPools, pool: messages.PoolState) -> int:
    return pools.blocks(pool.pool_id).free_slabs


def was_logged(pools: ServedPools, event: str, pool: messages.PoolState) -> bool:
    return any(f'"{event}"' in line and pool.pool_id in line for line in pools.worker.log().splitlines())


def test_a_killed_owner_gives_its_blocks_back(pools: ServedPools, pool: messages.PoolState) -> None:
    with remote(pools, pool) as owner:
        take(owner, NUM_BLOCKS)
        assert num_free(pools, pool) == 0
        owner.kill()
        until(lambda: leases(pools, pool) == {})
        assert num_free(pools, pool) == NUM_BLOCKS


def test_one_that_closes_gives_them_back_at_once(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as client:
        opened = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine"), leasing.LeaseOpened)
        client.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 9}), leasing.Granted)
        client.ask(leasing.CloseLease(lease_id=opened.lease_id), leasing.LeaseClosed)
        assert num_free(pools, pool) == NUM_BLOCKS
        with pytest.raises(StaleHandle):
            client.ask(leasing.CloseLease(lease_id=opened.lease_id), leasing.LeaseClosed)


def test_a_process_that_lives_on_keeps_its_blocks_from_others(pools: ServedPools, pool: messages.PoolState) -> None:
    """It has hung up and may still write into them; its reservations nobody has seen end at once."""
    with remote(pools, pool) as owner, pools.worker.client() as other:
        mine = take(owner, 60)
        held = pools.blocks(pool.pool_id)
        assert (held.groups[0].leased, held.groups[0].quarantined) == (60, 0)
        owner.do("hang_up")
        until(lambda: leases(pools, pool) == {"engine": "quarantined"})
        opened = other.ask(leasing.OpenLease(pool_id=pool.pool_id, name="other"), leasing.LeaseOpened)
        granted = other.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 4}), leasing.Granted)
        assert not set(mine) & set(memoryview(granted.ids[0]).cast("I"))
        with pytest.raises(OutOfBlocks):
            other.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1}), leasing.Granted)
        held = pools.blocks(pool.pool_id)
        assert (held.groups[0].leased, held.groups[0].quarantined) == (4, 60)
        owner.kill()
        late = leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 60}, wait_s=60)
        assert set(memoryview(other.ask(late, leasing.Granted).ids[0]).cast("I")) == set(mine)


def test_reservations_end_when_their_owner_hangs_up(pools: ServedPools, pool: messages.PoolState) -> None:
    client = pools.worker.client()
    opened = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine"), leasing.LeaseOpened)
    client.ask(leasing.Reserve(lease_id=opened.lease_id, blocks={0: 9}), leasing.Reserved)
    assert num_free(pools, pool) == NUM_BLOCKS - 9
    client.close()
    until(lambda: leases(pools, pool) == {"engine": "quarantined"})
    assert num_free(pools, pool) == NUM_BLOCKS


def test_one_that_dies_right_after_opening_is_seen_to_be_gone(pools: ServedPools, pool: messages.PoolState) -> None:
    """It is gone before the worker has read what it asked: the kernel names it all the same."""
    program = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from support.raw_client import RawClient; from kvpage.wire import leasing\n"
        "client = RawClient(Path(sys.argv[1]))\n"
        "print(flush=True); input()\n"
        "client.send(leasing.OpenLease(pool_id=sys.argv[2], name='engine'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    arguments = [str(pools.worker.socket_path), pool.pool_id, str(Path(__file__).parents[1])]
    child = subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline()  # it is connected
    os.kill(pools.worker.pid, signal.SIGSTOP)
    try:
        child.communicate(b"\n", timeout=60)
    finally:
        os.kill(pools.worker.pid, signal.SIGCONT)
    assert child.returncode == -signal.SIGKILL
    until(lambda: was_logged(pools, "lease_owner_gone", pool))
    until(lambda: leases(pools, pool) == {})
    assert num_free(pools, pool) == NUM_BLOCKS


def test_others_are_served_while_the_leases_of_one_end(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as looking, remote(pools, pool) as owner:
        for number in range(400):
            owner.do("open_lease", pool_id=pool.pool_id, name=f"one of many {number}")
        os.kill(owner.pid, signal.SIGKILL)
        describe = leasing.DescribeBlocks(pool_id=pool.pool_id)
        seen = set()
        while num_leases := looking.ask(describe, leasing.BlocksState).num_leases:
            seen.add(num_leases)
        owner.kill()
        assert len(seen) > 2, "nobody was answered before all had ended"


def test_an_heir_adopts_what_is_kept(pools: ServedPools, pool: messages.PoolState) -> None:
    with remote(pools, pool, keep_s=600) as owner, pools.worker.client() as heir:
        mine = take(owner, 9)
        owner.kill()
        until(lambda: leases(pools, pool) == {"engine": "kept"})
        assert num_free(pools, pool) == NUM_BLOCKS - 9
        adopted = heir.ask(leasing.AdoptLease(pool_id=pool.pool_id, name="engine", token=TOKEN), leasing.LeaseOpened)
        assert (adopted.generation, adopted.token, adopted.blocks[0]) == (2, None, 9)
        held = heir.ask(leasing.ListHeld(lease_id=adopted.lease_id, group=0), leasing.HeldList)
        assert list(memoryview(held.ids).cast("I")) == sorted(mine)
        assert leases(pools, pool) == {"engine": "active"}


def test_what_nobody_adopts_is_kept_no_longer_than_asked(pools: ServedPools, pool: messages.PoolState) -> None:
    with remote(pools, pool, keep_s=0.05) as owner:
        take(owner, 9)
        owner.kill()
        until(lambda: leases(pools, pool) == {})
        assert num_free(pools, pool) == NUM_BLOCKS


def test_a_lease_is_adopted_from_an_owner_who_lives(pools: ServedPools, pool: messages.PoolState) -> None:
    """Who waits is told at once, what was reserved is given back, and the id from before is nobody's."""
    with RawClient(pools.worker.socket_path) as owner, pools.worker.client() as heir:
        opened = owner.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine", token=TOKEN)).body
        assert isinstance(opened, leasing.LeaseOpened)
        owner.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 60}, key=7))
        owner.ask(leasing.Reserve(lease_id=opened.lease_id, blocks={0: 4}))
        waiting = [
            owner.send(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: count}, wait_s=3600))
            for count in (8, 1, 2)
        ]
        adopt = leasing.AdoptLease(pool_id=pool.pool_id, name="engine", token=TOKEN)
        adopted = heir.ask(adopt, leasing.LeaseOpened)
        for request_id in waiting:  # the small ones fit now, and are not served all the same
            error = owner.answer(request_id).error
            assert error is not None
            assert error.code == "stale-handle"
        assert adopted.lease_id != opened.lease_id
        blocks = pools.blocks(pool.pool_id)
        assert (blocks.leases[0].blocks[0], blocks.leases[0].reserved[0], blocks.free_slabs) == (60, 0, 4)
        again = owner.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1})).error
        assert again is not None
        assert again.code == "stale-handle"
        same = heir.ask(leasing.TakeStep(lease_id=adopted.lease_id, key=7), leasing.Granted)
        assert len(same.ids[0]) == 4 * 60  # the answer to its last step is its successor's to ask for


def test_adopting_takes_the_token_and_the_name(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as owner, pools.worker.client() as thief:
        opened = owner.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine", token=TOKEN), leasing.LeaseOpened)
        with pytest.raises(PermissionDenied):
            thief.ask(leasing.AdoptLease(pool_id=pool.pool_id, name="engine", token=TOKEN + "?"), leasing.LeaseOpened)
        with pytest.raises(NotFound):
            thief.ask(leasing.AdoptLease(pool_id=pool.pool_id, name="other", token=TOKEN), leasing.LeaseOpened)
        with pytest.raises(PermissionDenied, match="bound to another connection"):
            thief.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1}), leasing.Granted)
        owner.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1}), leasing.Granted)


def test_adopting_again_and_again_keeps_no_descriptor(pools: ServedPools, pool: messages.PoolState) -> None:
    """Of a process that lives, and whose former connections are forgotten with their leases."""
    with pools.worker.client() as first:
        first.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine", token=TOKEN), leasing.LeaseOpened)
    until(lambda: leases(pools, pool) == {"engine": "quarantined"})
    num_fds = pools.worker.num_fds()
    for generation in range(2, 12):
        with pools.worker.client() as heir:
            adopt = leasing.AdoptLease(pool_id=pool.pool_id, name="engine", token=TOKEN)
            assert heir.ask(adopt, leasing.LeaseOpened).generation == generation
        until(lambda: leases(pools, pool) == {"engine": "quarantined"})
    assert pools.worker.settles_at(num_fds, pools.keeper)


# --- leases and pools ------------------------------------------------------------------------------------------------


def test_a_lease_is_a_hold_on_its_pool(pools: ServedPools, pool: messages.PoolState) -> None:
    delete = messages.DeletePool(pool_id=pool.pool_id)
    with pools.worker.client() as client:
        opened = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine"), leasing.LeaseOpened)
        with pytest.raises(Conflict, match="lease engine"):
            client.request(delete)
        client.ask(leasing.CloseLease(lease_id=opened.lease_id), leasing.LeaseClosed)
        state = client.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState)
        assert state.num_holders == 0


@pytest.mark.parametrize("keep_s", [0.0, 600.0], ids=["quarantined", "kept"])
def test_what_has_no_owner_does_not_hold_a_pool(pools: ServedPools, keep_s: float) -> None:
    pool = pools.create(PLAN, f"unheld for {keep_s}")
    with remote(pools, pool, keep_s=keep_s) as owner:
        take(owner, 9)
        if keep_s:
            owner.kill()
        else:
            owner.do("hang_up")
        until(lambda: leases(pools, pool) == {"engine": "kept" if keep_s else "quarantined"})
        pools.delete(pool.pool_id)


def test_a_pool_that_is_deleted_by_force_ends_its_leases(pools: ServedPools) -> None:
    pool = pools.create(PLAN, "by force")
    with RawClient(pools.worker.socket_path) as owner, RawClient(pools.worker.socket_path) as reader:
        opened = owner.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine")).body
        assert isinstance(opened, leasing.LeaseOpened)
        owner.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: NUM_BLOCKS}))
        waiting = owner.send(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1}, wait_s=3600))
        reading = reader.send(leasing.ReadEvents(pool_id=pool.pool_id, wait_s=3600))
        until(lambda: pools.blocks(pool.pool_id).tenants[0].num_waiting)
        reader.ask(messages.ListPools())
        deleted = pools.keeper.ask(messages.DeletePool(pool_id=pool.pool_id, force=True), messages.PoolDeleted)
        assert (deleted.pinned_bytes, deleted.num_holders) == (None, 0)  # its memory is free: nobody has it mapped
        for client, request_id in ((owner, waiting), (reader, reading)):
            error = client.answer(request_id).error
            assert error is not None
            assert error.code == "pool-not-found"
        error = owner.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1})).error
        assert error is not None
        assert error.code == "stale-handle"


def test_a_delete_that_waits_goes_on_when_the_last_lease_ends(pools: ServedPools) -> None:
    pool = pools.create(PLAN, "awaited")
    with remote(pools, pool) as owner, RawClient(pools.worker.socket_path) as deleting:
        request_id = deleting.send(messages.DeletePool(pool_id=pool.pool_id, timeout_s=600))
        deleting.ask(messages.ListPools())
        owner.do("hang_up")
        assert isinstance(deleting.answer(request_id).body, messages.PoolDeleted)


# --- leases by time --------------------------------------------------------------------------------------------------


def test_a_lease_by_time_is_anybodys_who_knows_its_id(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as first, pools.worker.client() as second:
        opened = first.ask(leasing.OpenLease(pool_id=pool.pool_id, name="web", ttl_s=60), leasing.LeaseOpened)
        first.close()
        granted = second.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 3}), leasing.Granted)
        assert len(granted.ids[0]) == 12
        renewed = second.ask(leasing.RenewLease(lease_id=opened.lease_id), leasing.LeaseRenewed)
        assert renewed.ttl_s == 60
        [described] = pools.blocks(pool.pool_id).leases
        assert described.expires_in_s is not None
        assert 0 < described.expires_in_s <= 60
        with pytest.raises(Conflict, match="lease web"):
            second.request(messages.DeletePool(pool_id=pool.pool_id))


def test_a_lease_by_time_ends_when_it_is_not_renewed(pools: ServedPools, pool: messages.PoolState) -> None:
    with RawClient(pools.worker.socket_path) as client:
        opened = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="web", ttl_s=0.1)).body
        assert isinstance(opened, leasing.LeaseOpened)
        client.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: NUM_BLOCKS}))
        waiting = client.send(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1}, wait_s=3600))
        error = client.answer(waiting).error
        assert error is not None
        assert error.code == "stale-handle"
        assert (leases(pools, pool), num_free(pools, pool)) == ({}, NUM_BLOCKS)


def test_who_hangs_up_takes_back_what_it_waits_for(pools: ServedPools, pool: messages.PoolState) -> None:
    """Also for a lease that stays."""
    with pools.worker.client() as client, RawClient(pools.worker.socket_path) as leaving:
        opened = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="web", ttl_s=60), leasing.LeaseOpened)
        granted = client.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 64}), leasing.Granted)
        for count in (40, 1, 1):
            leaving.send(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: count}, wait_s=3600))
        until(lambda: pools.blocks(pool.pool_id).tenants[0].num_waiting == 3)
        leaving.close()
        until(lambda: pools.blocks(pool.pool_id).tenants[0].num_waiting == 0)
        client.ask(leasing.TakeStep(lease_id=opened.lease_id, free=granted.ids), leasing.Granted)
        assert num_free(pools, pool) == NUM_BLOCKS


def test_a_reservation_ends_by_time(pools: ServedPools, pool: messages.PoolState) -> None:
    with pools.worker.client() as client:
        opened = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="engine"), leasing.LeaseOpened)
        reserve = leasing.Reserve(lease_id=opened.lease_id, blocks={0: 9}, ttl_s=0.05)
        reserved = client.ask(reserve, leasing.Reserved)
        until(lambda: num_free(pools, pool) == NUM_BLOCKS)
        with pytest.raises(NotFound, match="ran out"):
            client.ask(
                leasing.CommitReservation(lease_id=opened.lease_id, reservation_id=reserved.reservation_id),
                leasing.Granted,
            )


# --- who is gone -----------------------------------------------------------------------------------------------------


def test_a_process_is_known_by_its_number_and_its_beginning() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = born(child.pid)
    assert began > 0
    os.close(pidfd_by_number(child.pid, began))
    with pytest.raises(ProcessLookupError):
        pidfd_by_number(child.pid, began + 2)  # the number is another's by now
    child.kill()
    with child:
        pass
    with pytest.raises(ProcessLookupError):
        pidfd_by_number(child.pid, began)


def test_where_the_kernel_cannot_name_a_process_time_must_do() -> None:
    now_s = [0.0]
    loop = Loop(lambda: now_s[0])
    told = []
    departure = Departure(loop, None, 10.0)
    for name in ("a", "b", "c"):
        departure.add(name, lambda name=name: told.append(name))  # type: ignore[misc]
    departure.forget("b")
    loop.call_after(9.0, lambda: told.append("not yet"))
    for now_s[0] in (9.5, 12.0, 12.0):
        loop.call_after(0.0, loop.stop)
        loop.run()
    loop.close()
    assert told == ["not yet", "a", "c"]


def test_a_lease_whose_end_fails_is_ended_later(no_leaks: None, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no memory for it in that moment: nobody but the worker would ever try again."""
    close_lease, failures = LeasedPool.close_lease, iter(range(2))

    def close_or_fail(pool: LeasedPool, lease: Lease, *, owner_died: bool = False) -> None:
        if next(failures, None) is not None:
            raise MemoryError
        close_lease(pool, lease, owner_died=owner_died)

    monkeypatch.setattr(LeasedPool, "close_lease", close_or_fail)
    with WorkerThread(run_dir) as worker, worker.client() as client:
        body = messages.CreatePool(
            name="mimo", plan_id=PLAN.plan_id, plan=PLAN.to_json(), buffer_size_bytes=PLAN.buffer_size_bytes
        )
        pool = client.ask(body, messages.PoolCreated).pool
        client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        opened = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="web", ttl_s=0.1), leasing.LeaseOpened)
        client.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 9}), leasing.Granted)

        def described() -> leasing.BlocksState:
            return client.ask(leasing.DescribeBlocks(pool_id=pool.pool_id), leasing.BlocksState)

        until(lambda: described().num_leases == 0)
        assert described().free_slabs == NUM_BLOCKS
        assert next(failures, None) is None
        client.ask(messages.DeletePool(pool_id=pool.pool_id), messages.PoolDeleted)
