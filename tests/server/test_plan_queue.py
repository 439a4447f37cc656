"""Those who want plans take turns; nobody waits for ever, and nothing is planned for who has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from kvpage.errors import Draining, RateLimited, RequestTimeout
from kvpage_server.plan_queue import NUM_THREADS, Asker, PlanQueue, asker_of

pytestmark = pytest.mark.anyio


class Busy:
    """A queue whose threads are at work until `finish`, with what was begun meanwhile, in order."""

    def __init__(self, **options: float) -> None:
        self.queue = PlanQueue(**options)  # type: ignore[arg-type]  # what the test names
        self.begun: list[str] = []
        self._finish, self._working = threading.Event(), threading.Semaphore(0)

    async def occupy(self) -> list[asyncio.Future[None]]:
        working = [self.ask("busy", self._wait) for _ in range(NUM_THREADS)]
        for _ in range(NUM_THREADS):
            assert await asyncio.to_thread(self._working.acquire, timeout=60)
        return working

    def _wait(self) -> None:
        self._working.release()
        assert self._finish.wait(60)

    def ask(self, asker: str, work: Callable[[], None] | None = None, **options: object) -> asyncio.Future[None]:
        key = asker.rstrip("0123456789")
        to_do = work or (lambda: self.begun.append(asker))
        return asyncio.ensure_future(self.queue.run(to_do, Asker(key=key, **options)))  # type: ignore[arg-type]

    def finish(self) -> None:
        self._finish.set()

    def close(self) -> None:
        self.finish()
        self.queue.close()


@pytest.fixture
def busy() -> Iterator[Busy]:
    made = Busy()
    yield made
    made.close()


async def settled(*asked: asyncio.Future[None]) -> list[BaseException | None]:
    return await asyncio.gather(*asked, return_exceptions=True)


async def test_who_asks_for_one_plan_does_not_wait_behind_all_of_another(busy: Busy) -> None:
    working = await busy.occupy()
    greedy = [busy.ask(f"greedy{number}") for number in range(20)]
    await asyncio.sleep(0)
    modest = [busy.ask("modest"), busy.ask("other")]
    await asyncio.sleep(0)
    busy.finish()
    assert await settled(*working, *greedy, *modest) == [None] * (len(working) + 22)
    assert busy.begun.index("modest") < NUM_THREADS + 1
    assert busy.begun.index("other") < NUM_THREADS + 2
    assert [name for name in busy.begun if name.startswith("greedy")] == [f"greedy{number}" for number in range(20)]


async def test_when_there_is_no_place_who_has_most_waiting_loses_the_last() -> None:
    busy = Busy(max_pending=NUM_THREADS + 4)
    try:
        working = await busy.occupy()
        greedy = [busy.ask(f"greedy{number}") for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(RateLimited):
            await busy.ask("greedy5")
        modest = busy.ask("modest")
        with pytest.raises(RateLimited):
            await greedy[3]
        busy.finish()
        assert await settled(*working, *greedy[:3], modest) == [None] * (NUM_THREADS + 4)
    finally:
        busy.close()


async def test_one_who_has_as_many_waiting_as_anybody_is_refused_himself() -> None:
    busy = Busy(max_pending=NUM_THREADS + 2)
    try:
        working = await busy.occupy()
        two = [busy.ask("one"), busy.ask("other")]
        await asyncio.sleep(0)
        with pytest.raises(RateLimited):
            await busy.ask("third")
        busy.finish()
        assert await settled(*working, *two) == [None] * (NUM_THREADS + 2)
    finally:
        busy.close()


async def test_who_gets_no_turn_in_time_is_told_so() -> None:
    busy = Busy(patience_s=0.01)
    try:
        working = await busy.occupy()
        with pytest.raises(RateLimited, match="no turn"):
            await busy.ask("late")
        busy.finish()
        assert await settled(*working) == [None] * NUM_THREADS
        assert busy.begun == []
    finally:
        busy.close()


async def test_nothing_is_planned_for_who_has_hung_up(busy: Busy) -> None:
    working = await busy.occupy()
    gone, cancelled, there = busy.ask("gone", has_left=lambda: True), busy.ask("cancelled"), busy.ask("there")
    await asyncio.sleep(0)
    cancelled.cancel()
    busy.finish()
    assert await settled(*working, there) == [None] * (NUM_THREADS + 1)
    with pytest.raises(RequestTimeout):
        await gone
    assert busy.begun == ["there"]
    assert repr(busy.queue) == "<PlanQueue 0 running, 0 waiting of 0 askers>"


async def test_those_who_wait_are_told_when_the_server_ends(busy: Busy) -> None:
    working = await busy.occupy()
    waiting = busy.ask("waiting")
    await asyncio.sleep(0)
    busy.close()
    with pytest.raises(Draining):
        await waiting
    assert await settled(*working) == [None] * NUM_THREADS


async def test_what_fails_fails_for_who_asked_and_for_nobody_else(busy: Busy) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await busy.ask("unlucky", fail)
    await busy.ask("lucky")


async def test_who_asks_is_found_where_the_protocol_has_put_it() -> None:
    asker = Asker(key="10.0.0.1")
    assert asker_of({"state": {"asker": asker}}) is asker
    assert asker_of({}).key is None
