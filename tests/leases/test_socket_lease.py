"""Leases over a worker's socket: what becomes of them when the worker dies, the process forks, nobody closes them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvpage
from kvpage.client.block_stock import BlockStock
from kvpage.client.socket_lease import SocketLease
from kvpage.errors import (
    Conflict,
    NotFound,
    OutOfBlocks,
    PermissionDenied,
    PoolNotFound,
    SpecInvalid,
    StaleHandle,
    TooLarge,
)
from kvpage.pages.hashing import TokenHashes
from kvpage.pages.steps import Content, Step
from kvpage.wire import messages
from kvpage.wire.plain_client import PlainClient
from support.eventually import until
from support.leased_pools import plan_of
from support.served_leases import OverSocket, ServedPools


@pytest.fixture
def flat(pools: ServedPools) -> Iterator[OverSocket]:
    way = OverSocket(pools, plan_of("flat groups"))
    yield way
    assert until(lambda: way.free_slabs() == 8)
    way.close()


def test_a_request_under_way_when_the_worker_is_killed_is_done_once(flat: OverSocket) -> None:
    with flat.open("engine") as lease:
        before = lease.allocate(0, 2)
        os.kill(flat.pools.worker.pid, signal.SIGSTOP)
        answers: list[np.ndarray] = []
        asking = threading.Thread(target=lambda: answers.append(lease.allocate(0, 3)))
        asking.start()
        until(lambda: _is_asking(lease))
        flat.pools.kill()
        asking.join()
        [ids] = answers
        assert len(ids) == 3
        assert sorted([*before, *ids]) == lease.held()[0].ids.tolist()


def _is_asking(lease: SocketLease) -> bool:
    return lease._client is not None and lease._client._is_asking


def test_an_answer_that_was_lost_with_the_worker_is_given_again(flat: OverSocket) -> None:
    """The step was done, and the worker died before anybody read its answer."""
    with flat.open("engine") as lease:
        step = Step(key=lease.new_key(), allocate={0: 3, 1: 1})
        first = lease.step(step)
        flat.pools.kill()
        again = lease.step(step)
        assert {group: sorted(ids) for group, ids in again.ids.items()} == {
            group: sorted(ids) for group, ids in first.ids.items()
        }
        assert {group: len(held.ids) for group, held in lease.held().items()} == {0: 3, 1: 1}


@pytest.mark.parametrize("how", ["kill", "replace"])
def test_a_lease_goes_on_with_the_next_worker(flat: OverSocket, how: str) -> None:
    with flat.open("engine") as lease:
        ids = lease.allocate(0, 3)
        getattr(flat.pools, how)()
        lease.free(0, ids[:1])
        assert lease.held()[0].ids.tolist() == sorted(ids[1:])
        assert not set(lease.allocate(1, 2)) & set(ids[1:])
        [state] = flat.pools.blocks(flat.pool_id).leases
        assert (state.state, state.generation) == ("active", 2 if how == "kill" else 1)


def test_who_was_adopted_away_while_the_worker_was_dead_does_not_take_the_lease_back(flat: OverSocket) -> None:
    first = flat.open("engine", token="0123456789abcdef")
    ids = first.allocate(0, 2)
    flat.pools.kill()
    with flat.adopt("engine", "0123456789abcdef") as second:
        assert second.held()[0].ids.tolist() == sorted(ids)
        with pytest.raises(StaleHandle, match="generation"):
            first.free(0, ids)
        first.close()
        assert second.held()[0].ids.tolist() == sorted(ids)


def test_a_wrong_token_adopts_nothing(flat: OverSocket) -> None:
    with flat.open("engine") as lease:
        with pytest.raises(PermissionDenied):
            flat.adopt("engine", "not the token of it")
        with pytest.raises(NotFound):
            flat.adopt("another", lease.token)
        assert len(lease.allocate(0, 1)) == 1


def test_a_lease_of_a_pool_that_was_deleted_says_so(pools: ServedPools) -> None:
    way = OverSocket(pools, plan_of("flat"))
    lease = way.open("engine")
    with pytest.raises(Conflict, match="lease engine"):
        pools.keeper.ask(messages.DeletePool(pool_id=way.pool_id), messages.PoolDeleted)
    pools.keeper.ask(messages.DeletePool(pool_id=way.pool_id, force=True), messages.PoolDeleted)
    pools._drop(way.pool_id)
    with pytest.raises(StaleHandle):
        lease.allocate(0, 1)
    lease.close()
    with pytest.raises(PoolNotFound):
        kvpage.open_lease(way.name, name="engine", run_dir=str(pools.run_dir), timeout_s=0)


def test_a_lease_that_nobody_refers_to_is_closed(flat: OverSocket) -> None:
    flat.open("engine").allocate(0, 2)
    gc.collect()
    assert until(lambda: not flat.pools.blocks(flat.pool_id).num_leases)


def test_a_name_is_taken_while_somebody_has_it(flat: OverSocket) -> None:
    with flat.open("engine"), pytest.raises(Conflict, match="adopt it"):
        flat.open("engine")
    flat.open("engine").close()


def test_waiting_for_blocks_ends_when_some_are_given_back(flat: OverSocket) -> None:
    with flat.open("first") as first, flat.open("second") as second:
        ids = first.allocate(0, 8)
        answers: list[np.ndarray] = []
        waiting = threading.Thread(target=lambda: answers.append(second.allocate(1, 2, wait_s=60)))
        waiting.start()
        until(lambda: flat.pools.blocks(flat.pool_id).tenants[0].num_waiting)
        with pytest.raises(OutOfBlocks):
            first.allocate(1, 1)
        first.free(0, ids[:3])
        waiting.join()
        assert len(answers[0]) == 2
        with pytest.raises(OutOfBlocks):
            second.allocate(0, 2, wait_s=0.05)


def test_a_prefix_that_one_has_cached_another_finds(flat: OverSocket) -> None:
    tokens = np.arange(64)
    with flat.open("first") as first:
        hashes = TokenHashes([16, 16], salt=first.salt)
        hashes.append(tokens)
        ids = first.allocate_all({0: 4, 1: 4})
        contents = {group: Content(ids[group], hashes.of(group, 4)) for group in (0, 1)}
        first.step(Step(commit=contents, free=ids))
    with flat.open("second") as second:
        given = [hashes.of(group, 4) for group in (0, 1)]
        found = second.find_prefix(given, 64)
        assert (found.num_tokens, found.ids[0].tolist()) == (64, ids[0].tolist())
        assert found.num_revived == (4, len(found.ids[1]))
        taken = second.take_prefix(given, 63)
        assert (taken.num_tokens, taken.ids[0].tolist()) == (48, ids[0][:3].tolist())
        assert second.held()[0].ids.tolist() == sorted(ids[0][:3])
    with flat.open("third", tenant="others") as third:
        assert third.salt != b""


def test_a_stock_hands_out_what_nobody_has(flat: OverSocket) -> None:
    with flat.open("engine") as lease, BlockStock(lease, 0, batch=2) as stock:
        ids = [stock.take() for _ in range(5)]
        assert len(set(ids)) == 5
        assert set(ids) <= set(lease.held()[0].ids.tolist())
        stock.put(ids[0])
        with pytest.raises(Conflict, match="put back"):
            stock.put(ids[0])
        with pytest.raises(Conflict):
            stock.put(0)
        assert stock.take() == ids[0]
        stock.keep(ids[1])
        with pytest.raises(Conflict):
            stock.put(ids[1])
        for block in (ids[0], *ids[2:]):
            stock.put(block)
        stock.close()
        assert lease.held()[0].ids.tolist() == [ids[1]]
        with pytest.raises(SpecInvalid):
            BlockStock(lease, 0, batch=0)


def test_a_stock_gives_back_what_is_too_much(flat: OverSocket) -> None:
    with flat.open("engine") as lease:
        stock = BlockStock(lease, 0, batch=1)
        ids = [stock.take() for _ in range(5)]
        for block in ids:
            stock.put(block)
        assert len(stock) == 3
        assert sorted(lease.held()[0].ids.tolist()) == sorted(ids[2:])


def test_blocks_of_states_are_cleared_through_an_attachment(pools: ServedPools) -> None:
    """Not-a-number in a state that becomes attention, or another's state, would reach what is computed from it."""
    plan = plan_of("states")
    way = OverSocket(pools, plan)
    with (
        kvpage.attach(way.name, run_dir=str(pools.run_dir)) as kv,
        way.open("engine", clear=kv.clear) as lease,
        way.open("careless") as careless,
    ):
        [state] = kv.tensors["state"]
        ids = lease.allocate(1, 2)
        state[ids.tolist()] = float("nan")
        lease.free(1, ids)
        grant = lease.step(Step(allocate={1: 2}))
        assert not grant.clear
        assert torch.count_nonzero(state[grant.ids[1].tolist()]) == 0
        state[grant.ids[1].tolist()] = float("nan")
        lease.free(1, grant.ids[1])
        attention = lease.allocate(0, 8)
        assert all(torch.count_nonzero(tensor[attention.tolist()]) == 0 for tensor in kv.tensors["full_attention.1"])
        lease.free(0, attention)
        with pytest.raises(Conflict, match="must be cleared"):
            careless.allocate(1, 2)
        assert careless.held() == {}
        grant = careless.step(Step(allocate={1: 1}))
        assert grant.clear[1].tolist() == grant.ids[1].tolist()
        with BlockStock(lease, 1, batch=2) as stock:
            stock.put(stock.take())
            assert len(stock) == 1  # the other went back to the worker, to be cleared for whoever has it next
    del state  # it keeps the memory mapped, and the pool held
    way.close()


def test_a_forked_child_has_no_part_in_it(flat: OverSocket) -> None:
    """It neither uses nor ends the lease of its parent. In a program of its own: tests never fork."""
    program = f"""
import os, kvpage
lease = kvpage.open_lease({flat.name!r}, name="engine", run_dir={str(flat.pools.run_dir)!r}, timeout_s=5)
ids = lease.allocate(0, 2)
pid = os.fork()
if not pid:
    try:
        lease.free(0, ids)
    except kvpage.KvpageError as error:
        os._exit(0 if "fork" in error.message else 1)
    os._exit(2)
assert os.waitpid(pid, 0)[1] == 0
assert lease.held()[0].ids.tolist() == sorted(ids.tolist())
lease.close()
"""
    assert run_program(program) == 0


def run_program(text: str) -> int:
    return subprocess.run([sys.executable, "-c", text], check=False, timeout=60).returncode


def test_a_killed_engine_leaves_its_blocks_to_who_adopts_them(flat: OverSocket) -> None:
    program = f"""
import os, signal, kvpage
lease = kvpage.open_lease(
    {flat.name!r}, name="engine", token="0123456789abcdef", keep_s=600, run_dir={str(flat.pools.run_dir)!r}
)
lease.allocate(0, 3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_program(program) == -signal.SIGKILL
    until(lambda: flat.pools.blocks(flat.pool_id).leases[0].state == "kept")
    with flat.adopt("engine", "0123456789abcdef") as lease:
        assert (len(lease.held()[0].ids), lease.generation) == (3, 2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda lease: lease.allocate(0, 1, wait_s=float("inf")),
        lambda lease: lease.allocate(0, 1, wait_s="x"),
        lambda lease: lease.allocate(0, -1),
        lambda lease: lease.allocate(0, 2**70),
        lambda lease: lease.allocate(2**70, 1),
        lambda lease: lease.allocate("a", 1),
        lambda lease: lease.reserve({0: 1}, wait_s=float("nan")),
        lambda lease: lease.free_one(0, 2**40),
        lambda lease: lease.step(Step(key=2**70, allocate={0: 1})),
    ],
)
def test_what_cannot_be_asked_costs_nothing(flat: OverSocket, ask: Callable[[SocketLease], object]) -> None:
    """The connection would be lost with it, and what is reserved with that."""
    with flat.open("engine") as lease, lease.reserve({0: 2}) as reserved:
        with pytest.raises(SpecInvalid):
            ask(lease)
        assert len(reserved.commit().ids[0]) == 2
        assert lease.generation == 1


def test_numbers_of_numpy_are_numbers(flat: OverSocket) -> None:
    with flat.open("engine") as lease:
        assert len(lease.allocate(np.int64(0), np.int32(2))) == 2  # type: ignore[arg-type]


def test_a_close_that_is_interrupted_closes(flat: OverSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ask again, and its process lives on: its blocks would stay quarantined."""
    lease = flat.open("engine")
    lease.allocate(0, 2)
    exchange, calls = PlainClient._exchange, iter((True, False))

    def interrupted(client: PlainClient, *arguments: Any) -> Any:
        if next(calls, False):
            raise KeyboardInterrupt
        return exchange(client, *arguments)

    monkeypatch.setattr(PlainClient, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.close()
    assert lease.closed
    assert not flat.pools.blocks(flat.pool_id).num_leases


def test_a_stock_of_a_lease_that_is_closed_hands_out_nothing(flat: OverSocket) -> None:
    lease = flat.open("engine")
    stock = BlockStock(lease, 0, batch=2)
    stock.take()
    lease.close()
    with pytest.raises(StaleHandle):
        stock.take()
    for group, batch in ((2, 1), (-1, 1), ("x", 1), (0, 0), (0, "x")):
        with pytest.raises(SpecInvalid):
            BlockStock(lease, group, batch)  # type: ignore[arg-type]


def test_a_lease_goes_on_when_the_worker_was_asked_to_end(flat: OverSocket) -> None:
    """Between two workers there is no socket at all."""
    with flat.open("engine") as lease:
        ids = lease.allocate(0, 2)
        flat.pools.end()
        answers: list[np.ndarray] = []
        asking = threading.Thread(target=lambda: answers.append(lease.allocate(0, 1)))
        asking.start()
        until(lambda: lease._client is None or lease._client.closed)
        flat.pools.begin()
        asking.join()
        assert sorted([*ids, *answers[0]]) == lease.held()[0].ids.tolist()


def test_a_step_that_waits_names_few_blocks(flat: OverSocket) -> None:
    """They are kept, and tried again each time something is given back."""
    with flat.open("engine") as lease, flat.open("other") as other:
        ids = lease.allocate(0, 8)
        many = np.repeat(ids[:1], 20_000)
        with pytest.raises(TooLarge, match="waits"):
            other.step(Step(retain={0: many}, allocate={0: 1}), wait_s=60)
        with pytest.raises(TooLarge, match="100000"):
            other.retain(0, np.repeat(ids[:1], 100_001))
        assert other.held() == {}
