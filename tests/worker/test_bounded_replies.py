"""Whatever clients do, a reply fits into a frame; and names are what a terminal may show."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpage.errors import InternalError, SpecInvalid, TooLarge, TooManyClients
from kvpage.wire import messages
from kvpage.wire.channel import MAX_FRAME_BYTES
from kvpage.wire.client import WorkerClient
from kvpage.wire.values import as_name
from kvpage_server.worker_limits import Limits
from support.pools import PLAN, PLAN_ID, attach_pool, create_pool
from support.raw_client import RawClient
from support.worker_process import WorkerProcess
from support.worker_thread import WorkerThread

pytestmark = pytest.mark.usefixtures("no_leaks")

LONGEST = "💣" * (messages.MAX_NAME_BYTES // 4)
NOT_NAMES = ["a" + LONGEST, "\x1b[2J", "two\nlines", "zero\0", "\u202eright to left"]
NOT_NAME_IDS = ["one byte too long", "escape", "newline", "zero", "direction"]


def longest_state() -> messages.PoolState:
    holder = messages.Holder(hold_id=2**64 - 1, pid=2**31, uid=2**32 - 1, client_name=LONGEST)
    return messages.PoolState(
        pool_id="pool-" + "0" * 16,
        name=LONGEST,
        device="G" * 80,
        epoch="0" * 32,
        plan_id=PLAN_ID,
        state="deleting",
        buffer_size_bytes=2**62,
        committed_bytes=2**62,
        num_holders=2**32,
        holders=[holder] * messages.MAX_HOLDERS_LISTED,
        error=messages.WireError(code="not-enough-memory", message="m" * 1000, details={"needed_bytes": 2**62}),
    )


def test_a_list_of_as_many_pools_as_a_worker_may_have_fits_into_a_frame() -> None:
    pools = messages.PoolList(pools=[longest_state()] * Limits().max_pools)
    frame = messages.ReplyFrame(id=2**64 - 1, epoch="0" * 32, body=pools)
    assert len(messages.encode(frame)) < MAX_FRAME_BYTES


def test_a_list_names_some_holders_and_counts_all(worker: WorkerProcess) -> None:
    count = messages.MAX_HOLDERS_LISTED + 5
    with worker.client(client_name=LONGEST) as client:
        create_pool(client, LONGEST)
        for _ in range(count):
            _, mapping = attach_pool(client, LONGEST)
            mapping.close()
        [listed] = client.ask(messages.ListPools(), messages.PoolList).pools
        assert (listed.num_holders, len(listed.holders)) == (count, messages.MAX_HOLDERS_LISTED)
        state = client.ask(messages.FindPool(name=LONGEST), messages.PoolState)
        assert (state.num_holders, len(state.holders)) == (count, count)


def test_a_worker_has_only_so_many_pools(run_dir: Path) -> None:
    with WorkerThread(run_dir, limits=Limits(max_pools=2)) as worker, worker.client() as client:
        there = [create_pool(client, f"{number}") for number in range(2)]
        with pytest.raises(TooManyClients):
            create_pool(client, "one too many")
        assert create_pool(client, "1") == there[1]  # to find one that is there takes no room
        assert len(client.ask(messages.ListPools(), messages.PoolList).pools) == 2


def test_a_reply_that_does_not_fit_is_an_error_and_the_connection_goes_on(run_dir: Path) -> None:
    with WorkerThread(run_dir) as worker, worker.client() as client:
        pool = create_pool(client)
        with worker.paused():
            [there] = worker.pools
            there.error = InternalError("x" * MAX_FRAME_BYTES)
        for body in (messages.ListPools(), messages.GetPool(pool_id=pool.pool_id), messages.FindPool(name="mimo")):
            with pytest.raises(TooLarge):
                client.request(body)
        there.error = None
        assert client.ask(messages.ListPools(), messages.PoolList).pools == [pool]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NOT_NAMES, ids=NOT_NAME_IDS)
def test_a_pool_has_a_printable_name_of_few_bytes(worker: WorkerProcess, name: str) -> None:
    with worker.client() as client:
        with pytest.raises(SpecInvalid):
            client.request(messages.CreatePool(name=name, plan_id=PLAN_ID, plan=PLAN, buffer_size_bytes=4096))
        assert client.ask(messages.ListPools(), messages.PoolList).pools == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NOT_NAMES, ids=NOT_NAME_IDS)
def test_so_has_a_client(worker: WorkerProcess, name: str) -> None:
    with RawClient(worker.socket_path, hello=False) as client:
        error = client.ask(messages.Hello(version=1, role="client", client_name=name)).error
        assert error is not None
        assert error.code == SpecInvalid.code
        assert error.message.isprintable()
        assert client.hang_up_reason() == ""


@pytest.mark.parametrize(
    ("text", "name"),
    [("engine 0", "engine 0"), ("\x1b[2J", "\\x1b[2J"), ("💣" * 100, LONGEST), ("\0" * 300, "\\x00" * 64)],
    ids=["as it is", "escaped", "cut", "escaped and cut"],
)
def test_any_text_makes_a_name(text: str, name: str, worker: WorkerProcess) -> None:
    assert as_name(text) == name
    WorkerClient(worker.socket_path, client_name=name).close()
