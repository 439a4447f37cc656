"""A worker or a client killed at any step of what a lease does: conservation holds, no block is owned twice or lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from kvpage.errors import KvpageError, OutOfBlocks, StaleHandle
from kvpage.pages.arrays import Arrays
from kvpage.pages.clearing import Clearing
from kvpage.pages.geometry import Geometry
from kvpage.pages.holding_arrays import HOLDER_BITS, SHARED, HoldingArrays
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Owner
from kvpage.pages.pool_buffer import PoolBuffer, pool_buffer_bytes
from kvpage.pages.steps import Content, Step
from kvpage.wire import leasing
from support import lease_kill_matrix as matrix
from support.dying import DyingApi
from support.eventually import until
from support.kill_matrix import Trial, every_step
from support.leaks import leak_guard
from support.lease_proof import ControlView, numbers_fault, prove, quiet_fault
from support.leased_pools import content, plan_of
from support.served_leases import OverSocket, ServedPools

PLAN = plan_of("three", 17)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[matrix.Scene]:
    with leak_guard(), matrix.scene(tmp_path_factory.mktemp("k")) as scene:
        yield scene


# --- what the matrix found -------------------------------------------------------------------------------------------


@pytest.fixture
def flat(no_leaks: None, run_dir: Path) -> Iterator[OverSocket]:
    pools = ServedPools(run_dir)
    way = OverSocket(pools, plan_of("flat"))
    yield way
    way.close()
    pools.close()


def test_a_lease_whose_opening_was_not_answered_is_opened_by_asking_again(flat: OverSocket) -> None:
    """The worker had noted it when it died: its name must not be taken for its owner."""
    body = leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="0123456789abcdef", key=7)
    with flat.pools.worker.client() as client:
        opened = client.ask(body, leasing.LeaseOpened)
    flat.pools.kill()
    with flat.pools.worker.client() as client:
        for other in (
            leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="another's, not it", key=7),
            leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="0123456789abcdef", key=8),
            leasing.OpenLease(pool_id=flat.pool_id, name="engine", token="0123456789abcdef"),
        ):
            with pytest.raises(KvpageError):
                client.ask(other, leasing.LeaseOpened)
        again = client.ask(body, leasing.LeaseOpened)
        assert (again.generation, again.blocks) == (2, [0])
        assert again.lease_id != opened.lease_id
        client.ask(leasing.CloseLease(lease_id=again.lease_id), leasing.LeaseClosed)


def test_a_lease_whose_adoption_was_not_answered_is_adopted_by_asking_again(flat: OverSocket) -> None:
    with flat.open("engine", token="0123456789abcdef") as lease:
        lease.allocate(0, 3)
        flat.pools.kill()
        body = leasing.AdoptLease(
            pool_id=flat.pool_id, name="engine", token="0123456789abcdef", generation=1, key=7
        )  # fmt: skip
        with flat.pools.worker.client() as client:
            assert client.ask(body, leasing.LeaseOpened).generation == 2
        flat.pools.kill()
        with flat.pools.worker.client() as client:
            another = leasing.AdoptLease(
                pool_id=flat.pool_id, name="engine", token="0123456789abcdef", generation=1, key=8
            )  # fmt: skip
            with pytest.raises(StaleHandle):
                client.ask(another, leasing.LeaseOpened)
            again = client.ask(body, leasing.LeaseOpened)
            assert again.blocks == [3]
            client.ask(leasing.CloseLease(lease_id=again.lease_id), leasing.LeaseClosed)


def test_who_adopts_a_lease_and_asks_for_its_last_step_again_clears_what_it_is_given(flat: OverSocket) -> None:
    """The blocks were clean when they were given, and the owner before may have written a state into them."""
    way = OverSocket(flat.pools, plan_of("states"))
    before = way.open("engine", token="0123456789abcdef")
    step = Step(key=before.new_key(), allocate={1: 2})
    first = before.step(step)
    assert not first.clear
    with way.adopt("engine", "0123456789abcdef") as lease:
        again = lease.step(step)
        assert again.ids[1].tolist() == again.clear[1].tolist() == first.ids[1].tolist()
    before.close()
    way.close()


def test_a_step_that_was_done_is_answered_again_while_others_wait(flat: OverSocket) -> None:
    """It needs no room: to refuse it, or to have it stand behind them, would deny what its lease holds."""
    with flat.open("first") as first, flat.open("second") as second, ThreadPoolExecutor(1) as thread:
        step = Step(key=first.new_key(), allocate={0: 3})
        ids = first.step(step).ids[0].tolist()
        waiting = thread.submit(second.allocate, 0, 8, wait_s=60)
        until(lambda: flat.pools.blocks(flat.pool_id).tenants[0].num_waiting)
        assert sorted(first.step(step).ids[0].tolist()) == sorted(ids)
        assert sorted(first.step(step, wait_s=60).ids[0].tolist()) == sorted(ids)
        with pytest.raises(OutOfBlocks):
            first.allocate(0, 1)
        first.free(0, ids)
        assert len(waiting.result()) == 8


# --- the proof -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound() -> bytearray:
    """A quiet pool: blocks of one lease, some shared with another, content that is cached."""
    state = bytearray(pool_buffer_bytes(Geometry.of(PLAN)))
    with LeasedPool(PLAN, state) as pool:
        first, _ = pool.open("first", Owner(pid=7), token="0123456789abcdef")
        second, _ = pool.open("second", Owner(pid=8), token="0123456789abcdef")
        ids = pool.do(first, Step(allocate={0: 3, 1: 5, 2: 3})).ids
        pool.do(second, Step(allocate={1: 3}, retain={0: ids[0][:1]}))
        pool.do(first, Step(commit={0: Content(ids[0], [content(1), content(2), content(3)])}, free={0: ids[0][1:2]}))
    return state


class Faulty:
    """A copy of the state, and the arrays in it, to be spoilt."""

    def __init__(self, sound: bytearray) -> None:
        self.state = bytearray(sound)
        geometry = Geometry.of(PLAN)
        parts = PoolBuffer.of(geometry, self.state)
        self.arrays = Arrays(geometry, parts.blocks, Clearing.of(PLAN))
        self.holdings = HoldingArrays(geometry, parts.holdings)
        self.rows = parts.records[64:].cast("q")
        self.held = np.flatnonzero((self.holdings.holding > 0) & (self.holdings.holding & SHARED == 1))
        self.free = np.flatnonzero(self.holdings.holding == 0)[-1]


def spoil_counts(state: Faulty) -> None:
    state.arrays.refs[state.held[0]] = 2


def lose_a_block(state: Faulty) -> None:
    """Nobody holds it, and it is not free."""
    state.holdings.holding[state.held[0]] = 0


def free_a_held_block(state: Faulty) -> None:
    state.arrays.refs[state.held[0]] = 0


def hold_by_nobody(state: Faulty) -> None:
    state.holdings.holding[state.held[0]] += 5


def hold_a_free_block(state: Faulty) -> None:
    state.holdings.holding[state.free] = state.holdings.holding[state.held[0]]


def change_its_group(state: Faulty) -> None:
    state.holdings.holding[state.held[0]] ^= 1 << HOLDER_BITS


def change_a_slabs_group(state: Faulty) -> None:
    slab = state.held[0] // Geometry.of(PLAN).slots_per_slab
    state.arrays.owners[slab] = 1 + state.arrays.owners[slab] % 3


def share_twice(state: Faulty) -> None:
    state.holdings.shares[0, 1] += 1


def share_nothing(state: Faulty) -> None:
    state.holdings.shares[0, 1] = 0


def lose_a_lease(state: Faulty) -> None:
    state.rows[2] = 0


def leave_an_operation(state: Faulty) -> None:
    state.holdings.begin(1, 0, 0)


def leave_a_change(state: Faulty) -> None:
    state.arrays.log_refs(state.held[:1], 1)


FAULTS = (
    spoil_counts, lose_a_block, free_a_held_block, hold_by_nobody, hold_a_free_block, change_its_group,
    change_a_slabs_group, share_twice, share_nothing, lose_a_lease, leave_an_operation, leave_a_change,
)  # fmt: skip


@pytest.mark.parametrize("spoil", FAULTS)
def test_the_proof_sees_what_is_wrong(sound: bytearray, spoil: Callable[[Faulty], None]) -> None:
    assert prove(PLAN, bytearray(sound))
    faulty = Faulty(sound)
    spoil(faulty)
    assert quiet_fault(PLAN, faulty.state) is not None
    with pytest.raises((AssertionError, KvpageError)):
        prove(PLAN, faulty.state)


def give_to_the_other(state: Faulty) -> None:
    state.holdings.holding[state.held[0]] += 1


def test_a_block_that_is_another_leases_is_seen_by_comparing_with_what_clients_believe(sound: bytearray) -> None:
    """The state is sound in itself."""
    believed = prove(PLAN, bytearray(sound))
    faulty = Faulty(sound)
    give_to_the_other(faulty)
    assert quiet_fault(PLAN, faulty.state) is None
    assert prove(PLAN, faulty.state) != believed


def test_an_operation_that_was_under_way_is_taken_back_before_a_stopped_pool_is_proved(sound: bytearray) -> None:
    faulty = Faulty(sound)
    leave_an_operation(faulty)
    faulty.holdings.set(faulty.held[:2], 0)
    assert prove(PLAN, faulty.state, is_quiet=False) == prove(PLAN, bytearray(sound))


def test_the_proof_sees_numbers_that_do_not_add_up(flat: OverSocket) -> None:
    with flat.open("engine") as lease:
        lease.allocate(0, 3)
        books = {"engine": {0: {int(block): 1 for block in lease.held()[0].ids}}}
        with ControlView(flat.pools.keeper, flat.pool_id) as view:
            assert prove(plan_of("flat"), view.copy()) == books
        told = flat.pools.blocks(flat.pool_id)
        assert numbers_fault(told, books) is None
        [group] = told.groups
        wrong = {
            "fewer are used": replace(told, groups=[replace(group, used=2)]),
            "fewer are leased": replace(told, groups=[replace(group, leased=2)]),
            "more slabs": replace(told, free_slabs=told.free_slabs + 1),
            "no lease": replace(told, leases=[]),
            "a lease with more": replace(told, leases=[replace(told.leases[0], blocks=[4])]),
            "a lease with reserved ones": replace(told, leases=[replace(told.leases[0], reserved=[1])]),
        }
        assert [name for name, numbers in wrong.items() if numbers_fault(numbers, books) is None] == []


# --- the matrix ------------------------------------------------------------------------------------------------------

SOME_STEPS = {
    "open": (9,), "allocate": (1,), "retain, commit, free and allocate": (3,), "reserve, and commit it": (6,),
    "close": (5,), "a client's death, its blocks kept": (12,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "step"), [(operation, step) for operation, steps in SOME_STEPS.items() for step in steps]
)
def test_a_worker_killed_at_a_step_leaves_every_lease_whole(scene: matrix.Scene, operation: str, step: int) -> None:
    assert not matrix.kill_worker_during(scene, operation, step).survived_the_operation


def test_a_worker_killed_at_a_random_call_leaves_every_lease_whole(scene: matrix.Scene, seed: int) -> None:
    chance = Random(seed)
    operation, call = chance.choice([*matrix.OPERATIONS]), chance.randint(1, 400)
    matrix.kill_worker_during(scene, operation, f"any{call}")


def test_a_killed_client_leaves_to_others_what_they_share(scene: matrix.Scene) -> None:
    assert not matrix.kill_client_in_a_session(scene, 17).survived_the_operation
    assert not matrix.kill_second_client_in_a_session(scene, 17).survived_the_operation


def test_a_killed_api_process_interrupts_no_lease_over_http(scene: matrix.Scene) -> None:
    assert not matrix.kill_api_in_a_session(scene, 9).survived_the_operation


def test_the_time_of_a_lease_over_http_goes_on_while_the_api_process_is_dead(scene: matrix.Scene) -> None:
    api = DyingApi(scene.run_dir)
    try:
        with api.client() as http:
            http.create_lease(scene.pool_id, name="http", ttl_s=0.5).allocate(0, 2)
    finally:
        api.kill()
    until(lambda: scene.told().num_leases == 0)
    scene.check_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("operation", matrix.OPERATIONS)
def test_a_worker_killed_at_every_step(scene: matrix.Scene, operation: str) -> None:
    assert every_step(lambda step: matrix.kill_worker_during(scene, operation, step)) > 2


@pytest.mark.long
@pytest.mark.parametrize("kill", matrix.OTHER_BLOWS.values(), ids=[*matrix.OTHER_BLOWS])
def test_the_others_killed_at_every_step(scene: matrix.Scene, kill: Callable[[matrix.Scene, int], Trial]) -> None:
    assert every_step(lambda step: kill(scene, step)) > 2
