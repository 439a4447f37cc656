"""The cases R01 to R20 of public bugs in allocators and in sharing memory, on leases and the processes that hold them.

What they say of a pool of one process alone is in tests/pages/test_operations.py and test_sequences.py, clearing by
bytes in tests/client/test_clearing.py.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpage
from kvpage.dtypes import item_size_bytes
from kvpage.errors import Conflict, OutOfBlocks, SpecInvalid, StaleHandle
from kvpage.memory.fake import FakeCalls, FakeMemory
from kvpage.pages.allocator import BlockPool
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids
from kvpage.pages.block_lease import BlockLease
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leased_sequences import LeasedBlocks, leased_sequences
from kvpage.pages.lifetimes import Lifetime
from kvpage.pages.local_lease import LocalLease
from kvpage.pages.sequence import Sequence as Blocks
from kvpage.pages.sequences import Sequences
from kvpage.plans import Plan
from kvpage.wire import leasing, messages
from kvpage.wire.client import WorkerClient
from kvpage_server.worker_device import DeviceMemory
from support.api_service import children_of
from support.eventually import until
from support.fakecuda_here import devices_here
from support.lease_kill_matrix import Client as LeaseProcess
from support.leased_pools import attention, content, plan_of, state
from support.pools import PLAN, PLAN_ID, create_pool
from support.raw_client import RawClient
from support.remote_client import RemoteClient
from support.served_leases import OverSocket, ServedPools
from support.worker_process import WorkerProcess
from support.worker_thread import Gate, WorkerThread

TOKEN = "a token of sixteen bytes or more"


@pytest.fixture
def sixteen(pools: ServedPools) -> Iterator[OverSocket]:
    """A pool of 15 blocks."""
    way = OverSocket(pools, plan_of("flat", 16))
    yield way
    assert until(lambda: way.free_slabs() == 15)
    way.close()


def told(way: OverSocket, group: int = 0) -> leasing.GroupBlocks:
    return way.pools.blocks(way.pool_id).groups[group]


def leases(pools: ServedPools, pool_id: str) -> dict[str, str]:
    """State by name."""
    return {lease.name: lease.state for lease in pools.blocks(pool_id).leases}


def granted(reply: leasing.Granted) -> set[int]:
    """Of group 0."""
    return set(memoryview(reply.ids[0]).cast("I"))


def remote(pools: ServedPools, name: str = "engine") -> RemoteClient:
    client = RemoteClient()
    client.do("connect", socket=str(pools.worker.socket_path), name=name)
    return client


# --- R01, R02, R03, R05: clients that die, or register twice ---------------------------------------------------------


def test_r01_nothing_of_a_killed_client_stays_mapped_or_charged(pools: ServedPools) -> None:
    """The worker maps the states of pools, and never a buffer: what a client mapped ends with the client."""
    device = messages.DescribeDevice()
    before = pools.keeper.ask(device, messages.DeviceState).reserved_bytes
    num_fds, num_mapped = pools.worker.num_fds(), pools.num_mapped()
    plan = plan_of("flat", 4097)
    pool = pools.create(plan, "r01")
    with remote(pools) as client:
        client.do("attach", name="r01")
        lease_id = client.do("open_lease", pool_id=pool.pool_id, name="engine")["lease_id"]
        client.do("allocate", lease_id=lease_id, count=4096)
        client.do("write", offset=0, data="in use")
        assert pools.num_mapped() == num_mapped + 1  # the state
        with pytest.raises(Conflict):
            pools.keeper.request(messages.DeletePool(pool_id=pool.pool_id))
        client.kill()
    until(lambda: leases(pools, pool.pool_id) == {})
    until(lambda: not pools.keeper.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).holders)
    assert pools.blocks(pool.pool_id).free_slabs == 4096
    pools.delete(pool.pool_id)  # nobody has to be forced
    assert pools.num_mapped() == num_mapped
    assert pools.worker.settles_at(num_fds, pools.keeper)
    assert pools.keeper.ask(device, messages.DeviceState).reserved_bytes == before


@pytest.mark.parametrize("ttl_s", [0.0, 0.3], ids=["bound to its connection", "bound to time"])
def test_r02_a_client_that_dies_before_it_takes_a_block_is_gone(
    pools: ServedPools, sixteen: OverSocket, ttl_s: float
) -> None:
    """It never renewed: its time runs from the opening."""
    with remote(pools) as client:
        client.do("open_lease", pool_id=sixteen.pool_id, name="engine", ttl_s=ttl_s)
        [lease] = pools.blocks(sixteen.pool_id).leases
        if ttl_s:
            assert lease.expires_in_s is not None
            assert lease.expires_in_s <= ttl_s
        client.kill()
        until(lambda: leases(pools, sixteen.pool_id) == {})
    with sixteen.open("engine") as lease_of_the_name:
        assert len(lease_of_the_name.allocate(0, 15)) == 15


def test_r03_registering_again_counts_once(pools: ServedPools, sixteen: OverSocket) -> None:
    """Each attachment is a hold of its own, with a descriptor that its owner closes; a lease opened again with the same
    key and token is the one that is there."""
    assert told(sixteen).used == 0
    num_fds = pools.worker.num_fds()  # with the state that the worker has begun to read
    opening = leasing.OpenLease(pool_id=sixteen.pool_id, name="engine", token=TOKEN, key=7)
    with pools.worker.client() as client:
        first = client.ask(opening, leasing.LeaseOpened)
        client.ask(leasing.TakeStep(lease_id=first.lease_id, allocate={0: 3}), leasing.Granted)
        again = client.ask(opening, leasing.LeaseOpened)
        assert again.blocks == [3]
        assert leases(pools, sixteen.pool_id) == {"engine": "active"}
        holds = []
        for _ in range(2):
            attached = client.request(messages.Attach(pool_id=sixteen.pool_id))
            assert isinstance(attached.body, messages.Attached)
            [fd] = attached.fds
            os.close(fd)
            holds.append(attached.body.hold_id)
        client.ask(leasing.CloseLease(lease_id=again.lease_id), leasing.LeaseClosed)
        assert leases(pools, sixteen.pool_id) == {}
        for hold_id in holds:
            client.ask(messages.Detach(hold_id=hold_id), messages.Detached)
        state = client.ask(messages.GetPool(pool_id=sixteen.pool_id), messages.PoolState)
        assert (state.num_holders, told(sixteen).used) == (0, 0)
        for closed in (first, again):
            with pytest.raises(StaleHandle):
                client.ask(leasing.CloseLease(lease_id=closed.lease_id), leasing.LeaseClosed)
    assert pools.worker.settles_at(num_fds, pools.keeper)


class HungCalls(FakeCalls):
    """From `hang` on, closing memory waits at the gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate, self.hang = gate, False

    def close(self, fd: int) -> None:
        if self.hang:
            self._gate.pass_through("close")
        super().close(fd)


def new_client_can_do_everything(client: WorkerClient, plan: Plan) -> None:
    body = messages.CreatePool(
        name="another", plan_id=plan.plan_id, plan=plan.to_json(), buffer_size_bytes=plan.buffer_size_bytes
    )
    pool = client.ask(body, messages.PoolCreated).pool
    ready = client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
    assert ready.state == "ready"
    attached = client.request(messages.Attach(name="another"))
    assert len(attached.fds) == 1
    os.close(attached.fds[0])
    lease = client.ask(leasing.OpenLease(pool_id=pool.pool_id, name="new"), leasing.LeaseOpened)
    step = leasing.TakeStep(lease_id=lease.lease_id, allocate={0: 8})
    assert len(granted(client.ask(step, leasing.Granted))) == 8
    client.ask(leasing.CloseLease(lease_id=lease.lease_id), leasing.LeaseClosed)


def test_r05_a_release_that_hangs_after_a_death_stops_nobody(no_leaks: None, run_dir: Path) -> None:
    gate, plan = Gate("close"), plan_of("flat")
    calls = HungCalls(gate)
    device = DeviceMemory.of(FakeMemory(calls=calls))
    with WorkerThread(run_dir, gate=gate, device=device) as worker, RawClient(worker.socket_path) as deleting:
        with worker.client() as maker, RemoteClient() as dying:
            pool = create_pool(maker)
            dying.do("connect", socket=str(worker.socket_path))
            dying.do("attach", name=pool.name)
            calls.hang = True
            asked = deleting.send(messages.DeletePool(pool_id=pool.pool_id, timeout_s=600))
            dying.kill()
            assert gate.arrived.wait(60), "nothing was released"
            assert maker.ask(messages.GetPool(pool_id=pool.pool_id), messages.PoolState).state == "deleting"
        with worker.client(client_name="new") as new:
            new_client_can_do_everything(new, plan)
            assert {one.name for one in new.ask(messages.ListPools(), messages.PoolList).pools} == {"mimo", "another"}
        assert len(calls.open_fds) == 2, "it did not hang until now"
        gate.open()
        assert deleting.answer(asked).body == messages.PoolDeleted(pool_id=pool.pool_id)
    assert not calls.open_fds


def test_r05_a_driver_that_hangs_while_memory_is_freed_stops_nobody(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that frees it is stopped, as one is that waits for a driver."""
    devices = devices_here()
    for name, value in devices.env().items():
        monkeypatch.setenv(name, value)
    body = messages.CreatePool(
        name="mimo", plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=1 << 20, handle_kind="cuda_ipc"
    )
    with WorkerProcess(run_dir, device="cuda:0") as worker, worker.client() as client, RemoteClient() as dying:
        pool = client.ask(body, messages.PoolCreated).pool
        client.ask(messages.WaitPool(pool_id=pool.pool_id, timeout_s=60), messages.PoolState)
        [driver] = children_of(worker.pid)
        dying.do("connect", socket=str(worker.socket_path))
        dying.do("attach", name="mimo")
        os.kill(driver, signal.SIGSTOP)
        try:
            dying.kill()
            client.ask(messages.DeletePool(pool_id=pool.pool_id, timeout_s=60), messages.PoolDeleted)
            with worker.client(client_name="new") as new:
                again = new.ask(body, messages.PoolCreated).pool
                ready = new.ask(messages.WaitPool(pool_id=again.pool_id, timeout_s=60), messages.PoolState)
                assert (ready.state, again.pool_id != pool.pool_id) == ("ready", True)
            assert devices.used_bytes(devices.uuids[0]) == 2 * (2 << 20), "it did not hang until now"
        finally:
            os.kill(driver, signal.SIGCONT)
        until(lambda: devices.used_bytes(devices.uuids[0]) == 2 << 20)
        client.ask(messages.DeletePool(pool_id=again.pool_id), messages.PoolDeleted)
    until(lambda: devices.used_bytes(devices.uuids[0]) == 0)


# --- R06, R07, R08, R10: counting ------------------------------------------------------------------------------------


@pytest.fixture(params=["in process", "over a socket"])
def lease(request: pytest.FixtureRequest) -> Iterator[tuple[BlockLease, Callable[[], tuple[int, int, int]]]]:
    """Of a pool of 15 blocks, and what that has: used, cached, to be had."""
    if request.param == "in process":
        pool = LeasedPool(plan_of("flat", 16))
        with pool, LocalLease(pool, "engine") as here:

            def counts() -> tuple[int, int, int]:
                pool.check()
                one = pool.blocks.counts(0)
                return one.used, one.cached, pool.blocks.available(0)

            yield here, counts
        return
    way: OverSocket = request.getfixturevalue("sixteen")
    with way.open("engine") as served:

        def told_counts() -> tuple[int, int, int]:
            way.check()
            one = told(way)
            return one.used, one.cached, one.available

        yield served, told_counts


Counted = tuple[BlockLease, Callable[[], tuple[int, int, int]]]


def test_r06_a_block_named_twice_in_one_free_comes_back_once(lease: Counted) -> None:
    engine, counts = lease
    block = engine.allocate(0, 1)
    engine.retain(0, block)
    assert counts() == (1, 0, 14)
    engine.free(0, [block[0], block[0]])
    assert counts() == (0, 0, 15)
    assert sorted(engine.allocate(0, 15).tolist()) == list(range(1, 16))


def test_r07_a_second_free_is_refused_and_changes_nothing(lease: Counted) -> None:
    engine, counts = lease
    block = engine.allocate(0, 1)
    engine.free(0, block)
    with pytest.raises(Conflict):
        engine.free(0, block)
    assert counts() == (0, 0, 15)
    assert engine.allocate(0, 1).tolist() != engine.allocate(0, 1).tolist()
    assert counts() == (2, 0, 13)


def test_r08_a_negative_number_of_blocks_is_refused_and_changes_nothing(lease: Counted) -> None:
    engine, counts = lease
    engine.allocate(0, 6)
    before = counts()
    assert before == (6, 0, 9)
    for refused in (
        lambda: engine.allocate(0, -3), lambda: engine.allocate_all({0: -3}), lambda: engine.allocate_run(0, -3),
        lambda: engine.reserve({0: -3}),
    ):  # fmt: skip
        with pytest.raises(SpecInvalid):
            refused()
        assert counts() == before


def test_r10_what_is_cached_and_let_go_is_not_used(lease: Counted) -> None:
    engine, counts = lease
    block = engine.allocate(0, 1)
    engine.commit(0, block, [content(1)])
    assert counts() == (1, 0, 14)
    engine.commit(0, block, [content(1)])  # caching again is no holding
    engine.free(0, block)
    assert counts() == (0, 1, 15)


@given(st.lists(st.sampled_from(["take", "cache", "release", "hit"]), max_size=30))
def test_r10_used_cached_and_free_are_all_there_is_whatever_is_done(doing: list[str]) -> None:
    with LeasedPool(plan_of("flat", 6)) as pool, LocalLease(pool, "engine") as engine:
        held: list[int] = []
        cached: set[int] = set()
        for number, what in enumerate(doing):
            if what == "take" and len(set(held)) < 5:
                [block] = engine.allocate(0, 1).tolist()
                held.append(block)
                cached.discard(block)
            elif what == "cache" and held and held[0] not in cached:
                engine.commit(0, held[:1], [content(number)])
                cached.add(held[0])
            elif what == "release" and held:
                engine.free(0, [held.pop()])
            elif what == "hit" and cached:
                engine.retain(0, [min(cached)])
                held.append(min(cached))
            counts, slabs = pool.blocks.counts(0), pool.blocks.slab_counts()
            assert counts.used == len(set(held)) == 5 - slabs.free - counts.cached
            assert counts.cached == len(cached - set(held))
            pool.check()


# --- R12: frees that meet in the middle of a block -------------------------------------------------------------------


class NeverAgain:
    """Blocks that are handed out once: one that comes back twice is seen, and no other has its number."""

    def __init__(self) -> None:
        self.num_taken = 0
        self.freed: Counter[int] = Counter()

    def allocate_all(self, counts: Mapping[int, int]) -> dict[int, Ints]:
        first = 1 + self.num_taken
        self.num_taken += counts[0]
        return {0: np.arange(first, first + counts[0], dtype=np.int32)}

    def free(self, group: int, ids: Ids) -> None:
        self.freed.update(np.asarray(ids).tolist())

    def retain(self, group: int, ids: Ids) -> None:
        raise AssertionError("nothing is shared here")

    def times_held(self, group: int, ids: Ids) -> Ints:
        raise AssertionError("nothing is shared here")


def covered(blocks: Sequence[int], block_size: int, gone: range) -> set[int]:
    """Of a sequence's blocks those of which all tokens are gone: token by token."""
    return {
        block
        for number, block in enumerate(blocks)
        if all(token in gone for token in range(number * block_size, (number + 1) * block_size))
    }


def test_r12_ranges_that_meet_in_the_middle_of_a_block_free_whole_blocks_once() -> None:
    """The seam is at 576: [576, 1024) goes first, then [300, 576), which ends in the middle of block 1."""
    with LeasedPool(plan_of("flat", 16)) as pool, LocalLease(pool, "engine") as engine:
        with Sequences(LeasedBlocks(engine), [Lifetime(kind="full", block_size=512)]).new(range(1024)) as sequence:
            sequence.advance()
            first, second = sequence.table(0).tolist()
            for end, left in ((576, [first, second]), (300, [first])):
                sequence.truncate(end)
                assert set(left) == {first, second} - covered([first, second], 512, range(end, 1024))
                assert engine.held()[0].ids.tolist() == sorted(left)
            assert pool.blocks.counts(0).used == 1
            with pytest.raises(Conflict):
                engine.free(0, [second])
        assert engine.held() == {}


@given(st.sampled_from(["full", "window"]), st.integers(1, 6), st.integers(1, 30), st.lists(st.integers(0, 40)))
def test_r12_a_block_is_given_back_once_and_when_all_of_its_tokens_are_gone(
    kind: Any, block_size: int, reach: int, turns: list[int]
) -> None:
    """Rejected tokens go from the end, those that a window has left behind from the start; both may end in a block."""
    lifetime = Lifetime(kind=kind, block_size=block_size, reach=reach if kind == "window" else 0)
    source = NeverAgain()
    with Sequences(source, [lifetime]).new(range(20)) as sequence:
        sequence.advance()
        blocks: list[int] = sequence.table(0).tolist()
        for turn in turns:
            before, num_tokens = set(source.freed), sequence.num_tokens
            gone = range(0)
            if turn % 2:
                gone = range(num_tokens - reach + 1) if kind == "window" else gone  # what token n looks back to, stays
                sequence.append(range(turn))
                blocks += sequence.table(0).tolist()[len(blocks) :]
            elif can_go_back(sequence, max(0, num_tokens - turn)):
                last = len(blocks) * block_size  # the last block may have room for tokens that never were
                gone = range(sequence.num_tokens, last)
            assert set(source.freed) - before == covered(blocks, block_size, gone) - before
            blocks = blocks[: -(-sequence.num_tokens // block_size)]
            assert source.num_taken - source.freed.total() == sum(sequence.num_held())
            assert not source.freed or max(source.freed.values()) == 1
    assert source.freed == Counter(range(1, source.num_taken + 1))


def can_go_back(sequence: Blocks, num_tokens: int) -> bool:
    try:
        sequence.truncate(num_tokens)
    except Conflict:  # what a window looks back to is gone
        return False
    return True


# --- R14: blocks that straddle ---------------------------------------------------------------------------------------

PAGE_BYTES, BLOCK_BYTES = 2_097_152, 1_605_632
Span = tuple[int, int]
"""First byte and one past the last."""


def whole_in_each(spans: Sequence[Span], piece_bytes: int, num_pieces: int) -> list[int]:
    """How many of the spans lie whole in each piece of memory, by looking at every one."""
    inside = Counter(start // piece_bytes for start, end in spans if start // piece_bytes == (end - 1) // piece_bytes)
    return [inside[piece] for piece in range(num_pieces)]


def by_formula(page_bytes: int, block_bytes: int, page: int) -> int:
    """floor((p + 1) P / K) - ceil(p P / K), never below 0."""
    return max(0, (page + 1) * page_bytes // block_bytes - -(-page * page_bytes // block_bytes))


def test_r14_blocks_laid_end_to_end_straddle_pages_and_are_not_whole_in_them() -> None:
    spans = [(block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES) for block in range(20)]
    assert whole_in_each(spans, PAGE_BYTES, 6) == [1, 0, 0, 1, 0, 0]
    for page_bytes in range(1, 30):
        for block_bytes in range(1, 30):
            spans = [(block * block_bytes, (block + 1) * block_bytes) for block in range(400)]
            expected = [by_formula(page_bytes, block_bytes, page) for page in range(12)]
            assert whole_in_each(spans, page_bytes, 12) == expected


def wide(heads: int, head_size: int, kind: str, **more: Any) -> dict[str, Any]:
    return attention(kind, heads, block_size=1024, head_size=head_size, **more)


STRADDLING = {
    "layers": [wide(8, 64, "full_attention"), wide(7, 56, "sliding_window", sliding_window=4096)],
    "strategy": "nested", "allocator": "slabs", "num_blocks": 7, "max_model_len": 1024, "max_num_batched_tokens": 1024,
}  # fmt: skip
"""A block of 1,024 tokens has a page of 2,097,152 bytes in one layer, and of 1,605,632 in the other."""


@cache
def nested_plan(name: str) -> Plan:
    return kvpage.plan(STRADDLING) if name == "straddling" else plan_of(name)


def spans_of(plan: Plan, group: int) -> dict[int, Span]:
    """By block, the bytes of its group's layers: from nothing but shapes and strides."""
    spans: dict[int, Span] = {}
    for name in plan.groups[group].layers:
        for view in plan.layers[name].tensors:
            axis, parts = view.block_axis, view.kernel_blocks_per_block
            steps = [*zip(view.shape, view.strides_bytes, strict=True)]
            extent, step = steps.pop(axis)
            last = sum((size - 1) * stride for size, stride in steps) + (parts - 1) * step + item_size_bytes(view.dtype)
            for block in range(extent // parts):
                start = view.offset_bytes + block * parts * step
                low, high = spans.get(block, (start, start + last))
                spans[block] = min(low, start), max(high, start + last)
    return spans


@pytest.mark.parametrize("name", ["straddling", "mixed", "cut twice", "three", "states", "cut states"])
def test_r14_no_block_straddles_slabs_and_as_many_are_handed_out_as_lie_whole_in_them(name: str) -> None:
    plan = nested_plan(name)
    pool = BlockPool.of(plan)
    assert max(pool.geometry.blocks_per_slab) > 1
    for group, of_plan in enumerate(plan.groups):
        spans = spans_of(plan, group)
        whole = whole_in_each([*spans.values()], plan.slab_bytes, plan.num_blocks)
        assert whole == [of_plan.blocks_per_slab] * plan.num_blocks
        assert len(spans) == sum(whole)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans.values()))
        assert pool.available(group) == sum(whole[1:])  # slab 0 is the null block's
        ids = pool.allocate(group, pool.available(group)).tolist()
        slabs = [block // of_plan.blocks_per_slab for block in ids]
        assert slabs == [spans[block][0] // plan.slab_bytes for block in ids]
        pool.free(group, ids)


# --- R15: stale bits -------------------------------------------------------------------------------------------------


def test_r15_attention_in_blocks_that_had_states_of_a_dead_process_reads_zeros(pools: ServedPools) -> None:
    """Not-a-number in every byte of the pool; who wrote it was killed."""
    way = OverSocket(pools, plan_of("states"))
    with (
        kvpage.attach(way.name, run_dir=str(pools.run_dir)) as kv,
        way.open("engine", clear=kv.clear) as engine,
        remote(pools) as dying,
    ):
        lease_id = dying.do("open_lease", pool_id=way.pool_id, name="states")["lease_id"]
        dying.do("allocate", lease_id=lease_id, count=32)
        kv.buffer.fill_(0xFF)
        dying.kill()
        until(lambda: told(way).available == 32)
        [keys] = kv.tensors["full_attention.1"]
        [states] = kv.tensors["state"]
        assert bool(torch.isnan(keys[1:].float()).all())
        taken = engine.allocate(1, 8)
        assert torch.count_nonzero(states[taken.tolist()]) == 0
        states[taken.tolist()] = float("nan")
        engine.free(1, taken)
        blocks = engine.allocate(0, 32)
        assert sorted(blocks.tolist()) == list(range(4, 36))
        assert torch.count_nonzero(keys[blocks.tolist()]) == 0
        assert bool(torch.isnan(keys[:4].float()).all()), "what nobody was given is as it was"
        del keys, states
    until(lambda: leases(pools, way.pool_id) == {})
    way.close()


# --- R17: an abandoned remote load -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_r17_blocks_of_an_abandoned_load_are_free_when_the_peer_is_gone_and_not_before(
    pools: ServedPools, sixteen: OverSocket, is_stopped: bool
) -> None:
    """The peer holds what it writes into: that it can write no more is known when its process has ended."""
    with (
        sixteen.open("engine") as engine,
        RawClient(pools.worker.socket_path) as other,
        closing(LeaseProcess(pools.run_dir)) as peer,
    ):
        load = set(engine.allocate(0, 12).tolist())
        peer.do("open", pool=sixteen.name, run_dir=str(pools.run_dir), lease="peer", token=TOKEN)
        assert peer.do("step", lease="peer", retain={0: sorted(load)}) == {"ids": {}}
        engine.free(0, sorted(load))  # the request is aborted
        opened = other.ask(leasing.OpenLease(pool_id=sixteen.pool_id, name="other")).body
        assert isinstance(opened, leasing.LeaseOpened)
        if is_stopped:
            os.kill(peer.pid, signal.SIGSTOP)  # it writes no more, says nothing, and is there
        now = other.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 3})).body
        assert isinstance(now, leasing.Granted)
        assert not granted(now) & load
        waiting = other.send(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 12}, wait_s=600))
        until(lambda: pools.blocks(sixteen.pool_id).tenants[0].num_waiting == 1)
        refused = other.ask(leasing.TakeStep(lease_id=opened.lease_id, allocate={0: 1})).error
        assert refused is not None
        assert refused.code == OutOfBlocks.code
        peer.kill()
        late = other.answer(waiting).body
        assert isinstance(late, leasing.Granted)
        assert granted(late) == load
        other.ask(leasing.CloseLease(lease_id=opened.lease_id))


@pytest.mark.parametrize("hold", ["reservation", "lease"])
def test_r17_a_hold_that_nobody_ends_has_a_deadline(pools: ServedPools, sixteen: OverSocket, hold: str) -> None:
    """Nobody was told which blocks are reserved, so nobody writes into them."""
    with pools.worker.client() as engine, pools.worker.client() as other:
        ttl_s = 0.2 if hold == "lease" else 0.0
        mine = engine.ask(leasing.OpenLease(pool_id=sixteen.pool_id, name="engine", ttl_s=ttl_s), leasing.LeaseOpened)
        theirs = other.ask(leasing.OpenLease(pool_id=sixteen.pool_id, name="other"), leasing.LeaseOpened)
        if hold == "lease":
            engine.ask(leasing.TakeStep(lease_id=mine.lease_id, allocate={0: 15}), leasing.Granted)
        else:
            engine.ask(leasing.Reserve(lease_id=mine.lease_id, blocks={0: 15}, ttl_s=0.2), leasing.Reserved)
        step = leasing.TakeStep(lease_id=theirs.lease_id, allocate={0: 15}, wait_s=600)
        assert granted(other.ask(step, leasing.Granted)) == set(range(1, 16))
        if hold == "lease":
            with pytest.raises(StaleHandle):
                engine.ask(leasing.TakeStep(lease_id=mine.lease_id, allocate={0: 1}), leasing.Granted)
        else:
            engine.ask(leasing.CloseLease(lease_id=mine.lease_id), leasing.LeaseClosed)
        other.ask(leasing.CloseLease(lease_id=theirs.lease_id), leasing.LeaseClosed)


# --- R18: what a killed server leaves --------------------------------------------------------------------------------


def named_memory(pid: int) -> list[str]:
    """Files of shared memory that a process has open or mapped, which would outlive it; a memfd has no name."""
    files = [os.path.realpath(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    return [place for place in [*files, *Path(f"/proc/{pid}/maps").read_text().splitlines()] if "/dev/shm/" in place]


def test_r18_a_killed_worker_leaves_no_memory_and_no_file_in_the_way_of_the_next(run_dir: Path) -> None:
    """The second pool fits where the first has left nothing; the socket of the dead is the successor's to remove."""
    with WorkerProcess(run_dir, "--memory", "64MiB") as worker, worker.client() as client, RemoteClient() as mapping:
        assert create_pool(client, size_bytes=60 << 20).state == "ready"
        mapping.do("connect", socket=str(worker.socket_path))
        mapping.do("attach", name="mimo")
        assert named_memory(worker.pid) == named_memory(mapping.pid) == []
        files = sorted(os.listdir(run_dir))
        worker.kill()
        mapping.kill()
    assert worker.socket_path.exists(), "nothing stale is in the way"
    with WorkerProcess(run_dir, "--memory", "64MiB") as successor, successor.client() as client:
        device = client.ask(messages.DescribeDevice(), messages.DeviceState)
        assert (device.num_pools, device.reserved_bytes, device.pinned_bytes) == (0, 0, 0)
        assert create_pool(client, size_bytes=60 << 20).state == "ready"
        assert sorted(os.listdir(run_dir)) == files
        assert successor.terminate() == 0
    assert not successor.socket_path.exists()


def test_r18_shared_memory_with_a_name_is_seen() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        assert named_memory(os.getpid()) == [file.name]


# --- R20: what is said to be needed ----------------------------------------------------------------------------------


@cache
def state_plan(num_slabs: int) -> Plan:
    """Full attention beside states, a block a slab each."""
    plan = kvpage.plan(
        {
            "layers": [attention("full_attention"), state(4096)],
            "strategy": "nested",
            "allocator": "slabs",
            "num_blocks": num_slabs,
            "max_model_len": 16,
            "max_num_batched_tokens": 16,
        }
    )
    assert [(group.kind, group.blocks_per_slab) for group in plan.groups] == [("full_attention", 1), ("mamba", 1)]
    return plan


def no_clear(group: int, ids: Ints) -> None:
    """Nothing is written into these blocks."""


def run(plan: Plan, lease: Any, tokens: Sequence[int]) -> None:
    """A request from its start to its end, whose whole blocks and states are kept for others."""
    sequences = leased_sequences(plan, lease)
    with sequences.new(tokens) as sequence:
        sequence.advance(len(tokens) // 16 * 16 - sequence.needs(0).prefix_tokens)
        sequence.checkpoint()
        sequence.commit()
    sequences.copies_done()


def test_r20_a_state_that_another_process_left_takes_the_two_blocks_that_were_said(pools: ServedPools) -> None:
    """One for the restored state, one for the new token to go on in; with one block less nothing is taken."""
    plan = state_plan(6)
    way = OverSocket(pools, plan)
    with way.open("first", clear=no_clear) as first:
        run(plan, first, range(16))
    assert [told(way, group).cached for group in (0, 1)] == [1, 1]
    with way.open("second", clear=no_clear) as second, way.open("blocker", clear=no_clear) as blocker:
        sequences = leased_sequences(plan, second)
        sequence = sequences.new(range(17))
        needs = sequence.needs(1)
        assert needs.prefix_tokens == 16
        assert (needs.new_blocks, needs.revived_blocks) == ((1, 1), (1, 1))
        ids = blocker.allocate(0, 2)  # of 5, and 4 are needed
        with pytest.raises(OutOfBlocks):
            sequence.advance(1)
        assert [told(way, group).used for group in (0, 1)] == [2, 0]
        blocker.free(0, ids[:1])
        assert sequence.needs(1) == needs
        sequence.advance(1)
        assert [told(way, group).used for group in (0, 1)] == [1 + 2, 2]
        sequences.copies_done()
        assert told(way, 1).used == 1
        sequence.close()
    way.close()


PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 50))
"""Family, whose prompts begin alike, and length."""


def prompt(family: int, length: int) -> list[int]:
    return [*range(20), *[family] * 12, *range(20)][:length]


@given(
    st.lists(PROMPTS, min_size=1, max_size=4),
    PROMPTS,
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.integers(4, 15),
)
def test_r20_where_there_is_what_a_step_was_said_to_need_it_never_fails(
    before: list[tuple[int, int]], last: tuple[int, int], steps: list[int], num_taken: int
) -> None:
    """Whatever others have cached, and however little is left beside it."""
    plan = state_plan(16)
    with LeasedPool(plan) as pool, LocalLease(pool, "others", clear=no_clear) as others:
        for family, length in before:
            if length >= 16:
                run(plan, others, prompt(family, length))
        others.allocate(0, num_taken)
        with LocalLease(pool, "engine", clear=no_clear) as engine:
            sequences = leased_sequences(plan, engine)
            sequence = sequences.new(prompt(*last))
            for step in steps:
                step_tokens = min(step, sequence.num_known_tokens - _reached(sequence))
                if not _step_as_said(pool, sequence, step_tokens):
                    break
                sequences.copies_done()
            sequence.close()
        assert pool.blocks.counts(0).used == num_taken
        assert pool.blocks.counts(1).used == 0
        pool.check()


def _reached(sequence: Blocks) -> int:
    return sequence.num_tokens or sequence.needs(0).prefix_tokens


def _step_as_said(pool: LeasedPool, sequence: Blocks, step_tokens: int) -> bool:
    """Whether there was room; then the step took what was said, and else nothing."""
    used = [pool.blocks.counts(group).used for group in (0, 1)]
    needs, slabs = sequence.needs(step_tokens), pool.blocks.slab_counts()
    taken = [new + revived for new, revived in zip(needs.new_blocks, needs.revived_blocks, strict=True)]
    has_room = sum(taken) <= slabs.free + slabs.idle
    if has_room:
        sequence.advance(step_tokens)
    else:
        with pytest.raises(OutOfBlocks):
            sequence.advance(step_tokens)
        taken = [0, 0]
    assert [pool.blocks.counts(group).used for group in (0, 1)] == [
        before + more for before, more in zip(used, taken, strict=True)
    ]
    return has_room
