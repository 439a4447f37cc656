"""What clients may ask about blocks, and what they are refused: by name, with nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvpage.wire import leasing, messages
from support.eventually import until
from support.leased_pools import content, plan_of
from support.raw_client import RawClient
from support.served_leases import ServedPools

PLAN = plan_of("flat groups", 65)
NUM_BLOCKS = 64
RESERVATION_ID = "reservation-0123456789abcdef"


class Engine:
    """A connection with a lease, which sees every answer."""

    def __init__(self, pools: ServedPools, pool: messages.PoolState, **options: Any) -> None:
        self.client = RawClient(pools.worker.socket_path)
        body = leasing.OpenLease(pool_id=pool.pool_id, **{"name": "engine"} | options)
        opened = self.client.ask(body).body
        assert isinstance(opened, leasing.LeaseOpened)
        self.opened, self.lease_id = opened, opened.lease_id

    def refusal(self, body: messages.RequestBody) -> tuple[str, str]:
        """Code and message."""
        error = self.client.ask(body).error
        assert error is not None, "it was done"
        return error.code, error.message

    def step(self, **fields: Any) -> dict[int, bytes]:
        return self.answer(self.send(**fields))

    def send(self, **fields: Any) -> int:
        return self.client.send(leasing.TakeStep(lease_id=self.lease_id, **fields))

    def answer(self, request_id: int) -> dict[int, bytes]:
        reply = self.client.answer(request_id)
        assert isinstance(reply.body, leasing.Granted), reply.error
        return reply.body.ids


@pytest.fixture
def pool(pools: ServedPools, request: pytest.FixtureRequest) -> Iterator[messages.PoolState]:
    pool = pools.create(PLAN, request.node.name)
    yield pool
    pools.delete(pool.pool_id, force=True)


@pytest.fixture
def engine(pools: ServedPools, pool: messages.PoolState) -> Iterator[Engine]:
    engine = Engine(pools, pool)
    yield engine
    engine.client.close()


def ids(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(4, "little") for block in blocks)


STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "half an id": ({"free": {0: b"abc"}}, "spec-invalid"),
    "half a hash": ({"commit": {0: leasing.ComputedBlocks(ids=ids(1), hashes=b"abc")}}, "spec-invalid"),
    "more hashes than blocks": (
        {"commit": {0: leasing.ComputedBlocks(ids=ids(1), hashes=bytes(range(32)))}}, "spec-invalid",
    ),
    "a block twice at once": (
        {"commit": {0: leasing.ComputedBlocks(ids=ids(1, 1), hashes=bytes(range(32)))}}, "conflict",
    ),
    "a block beyond the pool": ({"free": {0: ids(65)}}, "spec-invalid"),
    "the null block": ({"free": {0: ids(0)}}, "conflict"),
    "the largest number": ({"free": {0: ids(2**32 - 1)}}, "spec-invalid"),
    "one beyond 31 bits": ({"retain": {0: ids(2**31)}}, "spec-invalid"),
    "an unknown group to free": ({"free": {2: ids(1)}}, "spec-invalid"),
    "an unknown group to allocate": ({"allocate": {2: 1}}, "spec-invalid"),
    "an unknown group for two": ({"allocate": {2: 2}}, "spec-invalid"),
    "an unknown group to retain": ({"retain": {32767: ids(1)}}, "spec-invalid"),
    "a block that it does not hold": ({"free": {0: ids(60)}}, "conflict"),
    "a block of another group": ({"free": {1: ids(1)}}, "conflict"),
    "a block twice that it holds once": ({"free": {0: ids(1, 1)}}, "conflict"),
    "a block that nobody has": ({"retain": {0: ids(60)}}, "conflict"),
    "more than there are": ({"allocate": {0: 65}}, "out-of-blocks"),
    "more than there ever are": ({"allocate": {0: 65}, "wait_s": 3600}, "out-of-blocks"),
    "a run that is too long": ({"allocate": {0: 65}, "as_runs": True}, "out-of-blocks"),
    "more than an answer names": ({"allocate": {0: 500_001, 1: 500_000}}, "too-large"),
}  # fmt: skip


@pytest.mark.parametrize("fault", STEPS)
def test_a_step_with_a_fault_changes_nothing(
    pools: ServedPools, pool: messages.PoolState, engine: Engine, fault: str
) -> None:
    """With what is right beside it."""
    fields, code = STEPS[fault]
    assert sorted(memoryview(engine.step(allocate={0: 9})[0]).cast("I")) == list(range(1, 10))
    before = pools.blocks(pool.pool_id).groups
    right: dict[str, Any] = {"free": {0: ids(5)}, "allocate": {1: 3}}
    both = right | {
        name: right.get(name, {}) | value if isinstance(value, dict) else value for name, value in fields.items()
    }
    assert engine.refusal(leasing.TakeStep(lease_id=engine.lease_id, key=4, **both))[0] == code
    assert pools.blocks(pool.pool_id).groups == before
    assert len(engine.step(allocate={0: 1}, key=4)[0]) == 4  # the key of a step that was refused is not taken


def lease_requests(lease_id: str) -> dict[str, tuple[messages.RequestBody, str]]:
    half = b"abc"
    return {
        "held of no group": (leasing.ListHeld(lease_id=lease_id, group=2), "spec-invalid"),
        "blocks of no group": (leasing.InspectBlocks(lease_id=lease_id, group=2, ids=ids(1)), "spec-invalid"),
        "no blocks": (leasing.InspectBlocks(lease_id=lease_id, group=0, ids=ids(65)), "spec-invalid"),
        "half a block": (leasing.InspectBlocks(lease_id=lease_id, group=0, ids=half), "spec-invalid"),
        "contents of no group": (leasing.FindContents(lease_id=lease_id, group=2, hashes=b""), "spec-invalid"),
        "half a content": (leasing.FindContents(lease_id=lease_id, group=0, hashes=half), "spec-invalid"),
        "one group of two": (leasing.TakePrefix(lease_id=lease_id, hashes=[b""], at_most_tokens=9), "spec-invalid"),
        "half a prefix": (leasing.FindPrefix(lease_id=lease_id, hashes=[half] * 2, at_most_tokens=9), "spec-invalid"),
        "too much to reserve": (leasing.Reserve(lease_id=lease_id, blocks={0: 65}), "out-of-blocks"),
        "too much ever": (leasing.Reserve(lease_id=lease_id, blocks={0: 65}, wait_s=3600), "out-of-blocks"),
        "too much to be named": (leasing.Reserve(lease_id=lease_id, blocks={0: 1_000_001}), "too-large"),
        "of no group": (leasing.Reserve(lease_id=lease_id, blocks={2: 1}), "spec-invalid"),
        "not reserved": (
            leasing.CommitReservation(lease_id=lease_id, reservation_id=RESERVATION_ID), "not-found",
        ),
        "nothing to end": (
            leasing.EndReservation(lease_id=lease_id, reservation_id=RESERVATION_ID), "not-found",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("fault", lease_requests("lease-"))
def test_other_requests_with_a_fault_change_nothing(
    pools: ServedPools, pool: messages.PoolState, engine: Engine, fault: str
) -> None:
    body, code = lease_requests(engine.lease_id)[fault]
    before = pools.blocks(pool.pool_id)
    assert engine.refusal(body)[0] == code
    assert pools.blocks(pool.pool_id).groups == before.groups


def test_opening_has_its_own_rules(pools: ServedPools, pool: messages.PoolState, engine: Engine) -> None:
    def refused(**fields: Any) -> str:
        return engine.refusal(leasing.OpenLease(**{"name": "other", "pool_id": pool.pool_id} | fields))[0]

    assert refused(name="engine") == "conflict"
    assert refused(pool_id=None) == "spec-invalid"
    assert refused(pool_name=pool.name) == "spec-invalid"
    assert refused(name="esc\x1b") == "spec-invalid"
    assert refused(tenant="esc\x1b") == "spec-invalid"
    assert refused(pool_id="pool-0123456789abcdef") == "pool-not-found"
    assert pools.blocks(pool.pool_id).num_leases == 1


def test_only_the_api_sets_tenants_and_forgets_contents(pool: messages.PoolState, engine: Engine) -> None:
    for body in (leasing.SetTenants(pool_id=pool.pool_id, tenants=[]), leasing.ClearContents(pool_id=pool.pool_id)):
        code, message = engine.refusal(body)
        assert code == "permission-denied"
        assert "role 'api'" in message


def test_settings_of_tenants_are_checked(pools: ServedPools, pool: messages.PoolState) -> None:
    with RawClient(pools.worker.socket_path, role="api") as api:
        many = [leasing.TenantSettings(name=f"tenant {number}") for number in range(1001)]
        error = api.ask(leasing.SetTenants(pool_id=pool.pool_id, tenants=many)).error
        assert error is not None
        assert error.code == "spec-invalid"
        quota = leasing.TenantSettings(name="small", quota_bytes=3 * PLAN.groups[0].block_stride_bytes)
        assert isinstance(api.ask(leasing.SetTenants(pool_id=pool.pool_id, tenants=[quota])).body, leasing.TenantsSet)
    small = Engine(pools, pool, tenant="small")
    assert len(small.opened.salt) == 16
    small.step(allocate={0: 3})
    for wait_s in (0.0, 0.01):
        body = leasing.TakeStep(lease_id=small.lease_id, allocate={0: 1}, wait_s=wait_s)
        assert small.refusal(body)[0] == "out-of-blocks"
    impossible = leasing.TakeStep(lease_id=small.lease_id, allocate={0: 4}, wait_s=3600)
    assert small.refusal(impossible)[0] == "out-of-blocks"  # at once
    small.client.close()


def test_those_who_wait_are_served_in_turn(pools: ServedPools, pool: messages.PoolState, engine: Engine) -> None:
    """A small request does not overtake a large one, waiting or not."""
    held = engine.step(allocate={0: NUM_BLOCKS})[0]
    other = Engine(pools, pool, name="other")
    large, small = other.send(allocate={0: 40}, wait_s=3600), other.send(allocate={0: 1}, wait_s=3600)
    until(lambda: pools.blocks(pool.pool_id).tenants[0].num_waiting == 2)
    engine.step(free={0: held[: 4 * 20]})
    code, message = engine.refusal(leasing.TakeStep(lease_id=engine.lease_id, allocate={0: 1}))
    assert code == "out-of-blocks"
    assert "before this one" in message or "wait" in message
    engine.step(free={0: held[4 * 20 :]})
    assert (len(other.answer(large)[0]), len(other.answer(small)[0])) == (160, 4)
    tenant = pools.blocks(pool.pool_id).tenants[0]
    assert (tenant.num_waited, tenant.num_served, tenant.num_waiting) == (2, 2, 0)
    other.client.close()


def test_a_connection_waits_for_so_much_only(pools: ServedPools, pool: messages.PoolState, engine: Engine) -> None:
    engine.step(allocate={0: NUM_BLOCKS})
    waiting = [engine.send(allocate={0: 1}, wait_s=3600) for _ in range(16)]
    for late in (
        leasing.TakeStep(lease_id=engine.lease_id, allocate={0: 1}, wait_s=3600),
        leasing.ReadEvents(pool_id=pool.pool_id, wait_s=3600),
    ):
        assert engine.refusal(late)[0] == "rate-limited"
    assert isinstance(engine.client.ask(leasing.CloseLease(lease_id=engine.lease_id)).body, leasing.LeaseClosed)
    for request_id in waiting:
        error = engine.client.answer(request_id).error
        assert error is not None
        assert error.code == "stale-handle"
    again = engine.client.ask(leasing.ReadEvents(pool_id=pool.pool_id, wait_s=0.01))  # there is room again
    assert isinstance(again.body, leasing.EventList)


def test_waiting_ends_by_time_and_says_why(pool: messages.PoolState, engine: Engine) -> None:
    engine.step(allocate={0: 60})
    body = leasing.TakeStep(lease_id=engine.lease_id, allocate={0: 5}, wait_s=0.01)
    assert engine.refusal(body)[0] == "out-of-blocks"
    assert len(engine.step(allocate={0: 4})[0]) == 16  # nobody stands before it any more


def test_a_reservation_is_committed_in_parts_and_by_key(
    pools: ServedPools, pool: messages.PoolState, engine: Engine
) -> None:
    reserved = engine.client.ask(leasing.Reserve(lease_id=engine.lease_id, blocks={0: 9, 1: 2})).body
    assert isinstance(reserved, leasing.Reserved)

    def commit(**fields: Any) -> messages.ReplyFrame:
        body = leasing.CommitReservation(lease_id=engine.lease_id, reservation_id=reserved.reservation_id, **fields)
        return engine.client.ask(body)

    [lease] = pools.blocks(pool.pool_id).leases
    assert (lease.blocks, lease.reserved) == ([0, 0], [9, 2])
    first = commit(blocks={0: 4}, key=11).body
    assert isinstance(first, leasing.Granted)
    assert commit(blocks={0: 4}, key=11).body == first
    refused = commit(blocks={0: 6}).error
    assert refused is not None
    assert refused.code == "out-of-blocks"
    rest = commit(key=12).body
    assert isinstance(rest, leasing.Granted)
    assert commit(key=12).body == rest  # it has ended with that, and is asked again all the same
    [lease] = pools.blocks(pool.pool_id).leases
    assert (lease.blocks, lease.reserved) == ([9, 2], [0, 0])
    ended = commit(key=13).error
    assert ended is not None
    assert ended.code == "not-found"


def test_one_connection_has_so_many_leases_only(pools: ServedPools, pool: messages.PoolState, engine: Engine) -> None:
    """And so has a pool, with what they have reserved."""
    sent = [
        engine.client.send(leasing.OpenLease(pool_id=pool.pool_id, name=f"lease {number}")) for number in range(1023)
    ]
    replies = [engine.client.answer(request_id) for request_id in sent]
    assert [reply.error.code for reply in replies if reply.error] == ["too-many-clients"]
    assert engine.refusal(leasing.Reserve(lease_id=engine.lease_id, blocks={0: 1}))[0] == "too-many-clients"
    second = pools.create(PLAN, "one more")
    assert isinstance(
        engine.client.ask(leasing.OpenLease(pool_id=second.pool_id, name="last")).body, leasing.LeaseOpened
    )
    code, message = engine.refusal(leasing.OpenLease(pool_id=second.pool_id, name="too many"))
    assert code == "too-many-clients"
    assert "1024 leases" in message
    pools.replace()  # all of them go to another worker
    assert len(engine.step(allocate={0: 1})[0]) == 4
    pools.delete(second.pool_id, force=True)


def test_leases_are_for_plans_that_can_be_read(pools: ServedPools) -> None:
    """A worker that has none without NumPy, which a plan of another kind does not bring in."""
    made_up = messages.CreatePool(
        name="made up", plan_id="sha256:" + "0" * 64, plan=b'{"made": "up"}', buffer_size_bytes=1 << 20
    )
    pool = pools.keeper.ask(made_up, messages.PoolCreated).pool
    pools.keeper.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
    with RawClient(pools.worker.socket_path) as client:
        for body in (
            leasing.OpenLease(pool_id=pool.pool_id, name="engine"),
            leasing.DescribeBlocks(pool_id=pool.pool_id),
            leasing.ReadEvents(pool_id=pool.pool_id),
        ):
            error = client.ask(body).error
            assert error is not None
            assert error.code == "not-supported"
        attached = client.send(messages.Attach(name="made up"))
        assert isinstance(client.answer(attached).body, messages.Attached)
        client.ask(messages.Detach(hold_id=1), ack=attached)
    until(lambda: not pools.keeper.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).holders)
    pools.keeper.ask(messages.DeletePool(pool_id=pool.pool_id, timeout_s=60), messages.PoolDeleted)


# --- contents and events ---------------------------------------------------------------------------------------------


def committed(engine: Engine, count: int, first: int = 1) -> bytes:
    """Blocks of group 0 with so many contents; their ids."""
    blocks = engine.step(allocate={0: count})[0]
    hashes = b"".join(content(number) for number in range(first, first + count))
    engine.step(commit={0: leasing.ComputedBlocks(ids=blocks, hashes=hashes)})
    return blocks


def test_a_reader_is_told_what_comes_and_goes(pools: ServedPools, pool: messages.PoolState, engine: Engine) -> None:
    with RawClient(pools.worker.socket_path) as reader:
        waiting = reader.send(leasing.ReadEvents(pool_id=pool.pool_id, wait_s=3600))
        reader.ask(messages.ListPools())
        blocks = committed(engine, 2)
        told = reader.answer(waiting).body
        assert isinstance(told, leasing.EventList)
        assert [(event.kind, event.group, event.hashes) for event in told.events] == [
            ("stored", 0, content(1) + content(2))
        ]
        engine.step(free={0: blocks})
        cursor = {"log_id": told.log_id, "after": told.after}
        waiting = reader.send(leasing.ReadEvents(pool_id=pool.pool_id, wait_s=3600, **cursor))  # type: ignore[arg-type]
        reader.ask(messages.ListPools())
        pools.keeper.ask(leasing.ClearContents(pool_id=pool.pool_id), leasing.ContentsCleared)
        told = reader.answer(waiting).body
        assert isinstance(told, leasing.EventList)
        assert {event.kind for event in told.events} == {"removed"}
        nothing = reader.ask(leasing.ReadEvents(pool_id=pool.pool_id, log_id=told.log_id, after=told.after)).body
        assert nothing == leasing.EventList(log_id=told.log_id, after=told.after, has_missed=False, events=[])
        unknown = reader.ask(leasing.ReadEvents(pool_id=pool.pool_id, log_id="another", wait_s=3600)).body
        assert isinstance(unknown, leasing.EventList)
        assert unknown.has_missed


def test_all_contents_are_listed_in_parts(pools: ServedPools) -> None:
    plan = plan_of("flat groups", 45_001)
    pool = pools.create(plan, "large")
    engine = Engine(pools, pool)
    blocks = engine.step(allocate={0: 45_000})[0]
    chosen = [7, 19_999, 20_000, 20_001, 44_999, 45_000]
    hashes = [content(block) for block in chosen]
    engine.step(commit={0: leasing.ComputedBlocks(ids=ids(*chosen), hashes=b"".join(hashes))})
    assert len(blocks) == 4 * 45_000
    found, after, parts = b"", 0, 0
    while True:
        part = engine.client.ask(leasing.ListContents(pool_id=pool.pool_id, group=0, after_block=after)).body
        assert isinstance(part, leasing.ContentList)
        found, after, parts = found + part.hashes, part.last_block, parts + 1
        if part.is_last:
            break
    assert (found, parts) == (b"".join(hashes), 3)
    beyond = engine.client.ask(leasing.ListContents(pool_id=pool.pool_id, group=0, after_block=2**32 - 1)).body
    assert isinstance(beyond, leasing.ContentList)
    assert (beyond.hashes, beyond.is_last) == (b"", True)
    assert engine.refusal(leasing.ListContents(pool_id=pool.pool_id, group=2))[0] == "spec-invalid"
    engine.client.close()
    pools.delete(pool.pool_id, force=True)


def test_the_next_worker_knows_contents_and_has_other_events(pools: ServedPools, pool: messages.PoolState) -> None:
    engine = Engine(pools, pool)
    committed(engine, 3)
    cursor = engine.client.ask(leasing.ReadEvents(pool_id=pool.pool_id)).body
    assert isinstance(cursor, leasing.EventList)
    pools.kill()
    engine.client.close()
    with RawClient(pools.worker.socket_path) as reader:
        late = leasing.ReadEvents(pool_id=pool.pool_id, log_id=cursor.log_id, after=cursor.after, wait_s=3600)
        told = reader.ask(late).body
        assert isinstance(told, leasing.EventList)
        assert told.has_missed
        listed = reader.ask(leasing.ListContents(pool_id=pool.pool_id, group=0)).body
        assert isinstance(listed, leasing.ContentList)
        assert {listed.hashes[start : start + 16] for start in range(0, 48, 16)} == {content(n) for n in (1, 2, 3)}


def test_a_prefix_is_found_and_taken(pools: ServedPools, pool: messages.PoolState, engine: Engine) -> None:
    blocks = committed(engine, 2)
    window = engine.step(allocate={1: 2})[1]
    hashes = content(1) + content(2)
    engine.step(commit={1: leasing.ComputedBlocks(ids=window, hashes=hashes)})
    engine.step(free={0: blocks, 1: window})
    other = Engine(pools, pool, name="other")
    ask = {"lease_id": other.lease_id, "hashes": [hashes, hashes], "at_most_tokens": 32}
    found = other.client.ask(leasing.FindPrefix(**ask)).body  # type: ignore[arg-type]
    assert isinstance(found, leasing.PrefixFound)
    assert (found.num_tokens, found.ids[0], found.num_revived[0]) == (32, blocks, 2)
    taken = other.client.ask(leasing.TakePrefix(key=3, **ask)).body  # type: ignore[arg-type]
    assert isinstance(taken, leasing.PrefixTaken)
    assert (taken.num_tokens, taken.ids) == (found.num_tokens, found.ids)
    assert other.client.ask(leasing.TakePrefix(key=3, **ask)).body == taken  # type: ignore[arg-type]
    inspected = other.client.ask(leasing.InspectBlocks(lease_id=other.lease_id, group=0, ids=blocks)).body
    assert inspected == leasing.BlocksInspected(times=ids(1, 1), is_cached=b"\1\1")
    other.client.close()
