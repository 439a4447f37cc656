"""Events through a real server: contents that come and go, and where a reader goes on after it was cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import httpx
import pytest

from kvpage.errors import Conflict, KvpageError, PoolNotFound, SpecInvalid, WorkerLost
from kvpage.wire import leasing
from kvpage.wire.messages import PoolState
from kvpage_server.event_cursors import ContentsPlace, Cursor, as_page_token, as_word, contents_place, cursors_of
from kvpage_server.event_stream import EVENTS_AT_ONCE, MAX_STREAMS, EventStreams
from support.api_service import ApiService, kill_process
from support.eventually import until
from support.http_leases import Lease, Pool, http_client
from support.problems import assert_problem


class Event(NamedTuple):
    kind: str
    data: dict[str, Any]
    id: str


@contextlib.contextmanager
def reading(http: httpx.Client, after: str | None = None, **query: str) -> Iterator[Iterator[Event]]:
    headers = {} if after is None else {"Last-Event-ID": after}
    with http.stream("GET", "/v1/events", params=query, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events(response)


def events(response: httpx.Response) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        assert line != ": nothing new", "what was waited for has not come"
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif "event" in fields:
            yield Event(fields["event"], json.loads(fields["data"]), fields["id"])
            fields = {}


def contents(number: int) -> str:
    return f"{number:032x}"


def store(lease: Lease, *numbers: int) -> list[int]:
    """Blocks of group 0 in which others find these contents."""
    ids = lease.take(len(numbers))
    stored = {"0": {"ids": ids, "hashes": [contents(number) for number in numbers]}}
    assert lease.batch(commit=stored).is_success
    return ids


@pytest.fixture
def pool(shared_service: ApiService) -> Iterator[Pool]:
    with http_client(shared_service) as http:
        pool = Pool(http)
        yield pool
        pool.delete()


def test_contents_are_told_in_order_and_a_reader_goes_on_where_it_was(pool: Pool) -> None:
    lease = pool.lease()
    with reading(pool.http, pool_id=pool.id) as told:
        assert next(told).data == {"pool_id": pool.id, "name": "mimo", "device": "host", "state": "ready"}
        store(lease, 1)
        first = next(told)
    assert (first.kind, first.data) == (
        "stored",
        {"pool_id": pool.id, "number": 1, "group": 0, "hashes": [contents(1)]},
    )
    store(lease, 2, 3)
    pool.http.post(f"{pool.path}/prefixes:clear")
    with reading(pool.http, first.id) as told:
        assert next(told).kind == "pool"
        stored, removed = next(told), next(told)
        assert (stored.kind, stored.data["hashes"]) == ("stored", [contents(2), contents(3)])
        assert (removed.kind, sorted(removed.data["hashes"])) == ("removed", [contents(1), contents(2), contents(3)])
    with reading(pool.http, stored.id, pool_id=pool.id) as told:
        assert [next(told).kind, next(told)] == ["pool", removed]


def test_a_list_of_contents_says_where_to_read_on(pool: Pool) -> None:
    lease = pool.lease()
    store(lease, 1, 2)
    page = pool.http.get(f"{pool.path}/contents", params={"group": 0}).json()
    assert sorted(page["hashes"]) == [contents(1), contents(2)]
    store(lease, 3)
    with reading(pool.http, page["cursor"], pool_id=pool.id) as told:
        assert next(told).kind == "pool"
        event = next(told)
    assert (event.data["hashes"], event.data["number"]) == ([contents(3)], page["number"] + 1)


def test_pages_of_contents_go_on_in_the_same_log_only(pool: Pool) -> None:
    lease = pool.lease()
    blocks = store(lease, 1, 2)
    cursors = cursors_of(pool.http.get(f"{pool.path}/contents", params={"group": 0}).json()["cursor"])
    place = ContentsPlace(*cursors[pool.id], last_block=min(blocks))
    page = pool.http.get(f"{pool.path}/contents", params={"group": 0, "page_token": as_page_token(place)}).json()
    assert (len(page["hashes"]), cursors_of(page["cursor"])) == (1, cursors)
    other = as_page_token(ContentsPlace("0" * 32, 0, 0))
    assert_problem(pool.http.get(f"{pool.path}/contents", params={"group": 0, "page_token": other}), "stale-handle")


def test_pools_are_told_as_they_come_and_go(pool: Pool) -> None:
    with reading(pool.http) as told:
        assert next(told).data["pool_id"] == pool.id
        other = Pool(pool.http, "other")
        states = [next(told)]
        while states[-1].data["state"] != "ready":
            states.append(next(told))
        store(other.lease(), 1)
        assert next(told).data["pool_id"] == other.id
        other.delete()
        gone = next(event for event in told if event.data.get("state") != "deleting")
    assert {event.data["pool_id"] for event in states} == {other.id}
    assert gone.data == {"pool_id": other.id, "name": "other", "device": "host", "state": "deleted"}
    assert cursors_of(gone.id).keys() == {pool.id}


def test_the_stream_of_one_pool_ends_with_it(shared_service: ApiService) -> None:
    with http_client(shared_service) as http:
        pool = Pool(http)
        with reading(http, pool_id=pool.id) as told:
            next(told)
            pool.delete()
            assert [event.data["state"] for event in told][-1] == "deleted"
        assert_problem(http.get("/v1/events", params={"pool_id": pool.id}), "pool-not-found")


def test_a_reader_is_told_that_it_has_missed_what_the_worker_before_told(service: ApiService) -> None:
    with http_client(service) as http:
        pool = Pool(http)
        lease = pool.lease(ttl_s=60)
        with reading(http, pool_id=pool.id) as told:
            assert next(told).kind == "pool"  # from here on it is read
            store(lease, 1)
            assert next(told).kind == "stored"
            kill_process(service.worker_pid())
            missed = next(event for event in told if event.kind == "missed")
            assert missed.data == {"pool_id": pool.id}
            page = http.get(f"{pool.path}/contents", params={"group": 0}).json()
            assert page["hashes"] == [contents(1)]  # the prefix cache outlives its worker
            until(lambda: lease.batch_when_possible(key="a").is_success)
            store(lease, 2)
            assert next(told).data["hashes"] == [contents(2)]
            service.ask_to_end()
            assert list(told) == []  # and the stream ends in order
        assert service.wait() != 0


def test_so_many_streams_and_no_more_and_a_reader_that_leaves_makes_room(pool: Pool) -> None:
    with contextlib.ExitStack() as streams:
        open_ones = [streams.enter_context(reading(pool.http, pool_id=pool.id)) for _ in range(MAX_STREAMS)]
        assert {next(told).kind for told in open_ones} == {"pool"}
        assert_problem(pool.http.get("/v1/events"), "rate-limited")
    until(lambda: can_read(pool))


def can_read(pool: Pool) -> bool:
    with pool.http.stream("GET", "/v1/events") as response:
        return response.status_code == 200


class EndlessLog:
    """Stands for the pools of a server and the worker of one, which always has another page of events."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.num_pages = 0
        self.link = self
        self.each = [self]
        self.is_ready = True

    async def pools(self) -> list[PoolState]:
        return [
            PoolState(
                pool_id="pool-1", name="mimo", device="host", state="ready", plan_id="", epoch="", buffer_size_bytes=1,
                committed_bytes=1, num_holders=0, holders=[],
            )
        ]  # fmt: skip

    async def owner(self, pool_id: str) -> EndlessLog:
        return self

    async def open_apart(self) -> EndlessLog:
        return self

    def close(self) -> None: ...

    async def ask(self, body: leasing.ReadEvents, kind: type, *, wait_s: float = 0.0) -> leasing.EventList:
        await asyncio.sleep(0)
        self.num_pages += 1
        numbers = range(body.after + 1, body.after + body.at_most + 1)
        events = [leasing.ContentEvent(number=number, kind="stored", group=0, hashes=bytes(16)) for number in numbers]
        return leasing.EventList(log_id="a", after=numbers[-1], has_missed=False, events=events)


@pytest.mark.anyio
async def test_nothing_is_read_for_a_reader_that_takes_nothing() -> None:
    log = EndlessLog()
    parts = EventStreams(cast(Any, log)).read(None, {"pool-1": Cursor("a", 0)})
    async with contextlib.aclosing(parts):
        while b"event: stored" not in await anext(parts):
            pass
        for _ in range(1000):  # turns of the loop, in which whoever could go on would
            await asyncio.sleep(0)
        few_pages = log.num_pages
        assert few_pages <= 3
        for _ in range(2 * EVENTS_AT_ONCE):
            await anext(parts)
        assert log.num_pages > few_pages


class LateLog(EndlessLog):
    """The pool cannot be read at first."""

    def __init__(self) -> None:
        super().__init__()
        self.denials: list[KvpageError] = [PoolNotFound("no such pool"), Conflict("not ready"), WorkerLost("gone")]

    async def open_apart(self) -> EndlessLog:
        if self.denials:
            raise self.denials.pop()
        return self


@pytest.mark.anyio
async def test_a_pool_that_cannot_be_read_for_a_moment_is_read_again() -> None:
    log = LateLog()
    async with contextlib.aclosing(EventStreams(cast(Any, log)).read(None, {"pool-1": Cursor("a", 0)})) as parts:
        while b"event: stored" not in (part := await anext(parts)):
            assert b"nothing new" not in part
    assert log.denials == []


# --- cursors ----------------------------------------------------------------------------------------------------------


def test_a_cursor_is_what_it_was_made_of() -> None:
    cursors = {f"pool-{1:016x}": Cursor("a" * 32, 7), f"pool-{2:016x}": Cursor("b" * 32, 2**40)}
    assert cursors_of(as_word(cursors)) == cursors
    place = ContentsPlace("a" * 32, 7, 9)
    assert contents_place(as_page_token(place)) == place


def word_of(pool_id: str, log_id: str, number: int) -> str:
    return as_word({pool_id: Cursor(log_id, number)})


@pytest.mark.parametrize(
    "word",
    [
        "x",
        "kZ==",
        "ä",
        as_page_token(ContentsPlace("a", 1, 2)),
        "A" * 70_000,
        word_of("pool-1", "a", 1),
        word_of(f"pool-{1:016x}", "a" * 33, 1),
        word_of(f"pool-{1:016x}", "a", -1),
    ],
)
def test_what_is_no_cursor_is_refused(word: str) -> None:
    with pytest.raises(SpecInvalid, match="Last-Event-ID"):
        cursors_of(word)


@pytest.mark.parametrize("place", [("a" * 33, 1, 2), ("a", -1, 2), ("a", 1, 2**32), ("a", 1, -1)])
def test_what_is_no_page_token_is_refused(place: tuple[str, int, int]) -> None:
    with pytest.raises(SpecInvalid, match="page_token"):
        contents_place(as_page_token(ContentsPlace(*place)))


def test_a_reader_with_no_cursor_of_ours_is_told(pool: Pool) -> None:
    assert_problem(pool.http.get("/v1/events", headers={"Last-Event-ID": "x"}), "spec-invalid")
    assert_problem(pool.http.get("/v1/events", params={"after": "x"}), "spec-invalid")
