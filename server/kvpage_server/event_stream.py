"""What a reader of `/v1/events` is told: contents that came and went, and the states of pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from kvpage.client.block_resources import ContentEvent, MissedEvents, PoolEvent
from kvpage.errors import KvpageError, NotSupported, RateLimited
from kvpage.wire import leasing
from kvpage.wire.messages import PoolState
from kvpage_server.async_worker import AsyncWorker
from kvpage_server.event_cursors import Cursor, as_word
from kvpage_server.lease_bodies import unpacked_hashes
from kvpage_server.supervisor import Supervisor

MAX_STREAMS = 32
COMMENT_S = 15.0
"""How often an idle stream says something, so that both sides notice that the other is gone."""
LOOK_S = 1.0
"""How often a stream looks for pools that came, went or changed."""
EVENTS_AT_ONCE = 256
RETRY_S = 0.25
_WAIT_S = 60.0


class _Told(NamedTuple):
    """One event, until it is written."""

    kind: str
    data: msgspec.Struct
    pool_id: str
    cursor: Cursor | None
    """Where reading goes on after it; None: where it was."""


class EventStreams:
    """Those that are open."""

    def __init__(self, pools: Supervisor) -> None:
        self._pools = pools
        self._num_open = 0

    def __repr__(self) -> str:
        return f"<EventStreams {self._num_open} open>"

    def check_room(self) -> None:
        """Raises `RateLimited`."""
        if self._num_open >= MAX_STREAMS:
            raise RateLimited(f"{MAX_STREAMS} streams of events are open; close one")

    async def read(self, pool_id: str | None, cursors: dict[str, Cursor]) -> AsyncGenerator[bytes, None]:
        """The bytes of a stream, until the server ends, or the only pool of it goes."""
        self._num_open += 1
        stream = _Stream(self._pools, pool_id, cursors)
        try:
            async for part in stream.parts():
                yield part
        finally:
            self._num_open -= 1
            await stream.close()


MAX_POOLS = 1024
"""That a reader may have read of before."""


class _Stream:
    def __init__(self, pools: Supervisor, pool_id: str | None, cursors: dict[str, Cursor]) -> None:
        self._pools, self._pool_id = pools, pool_id
        self._cursors = {name: cursor for name, cursor in cursors.items() if pool_id in (None, name)}
        """How far the reader has been told."""
        self._queue: asyncio.Queue[_Told | None] = asyncio.Queue(EVENTS_AT_ONCE)
        """Readers of pools wait while it is full, and read nothing further; None: the end."""
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._shown: dict[str, PoolEvent] = {}
        self._others: list[asyncio.Future[Any]] = []

    async def close(self) -> None:
        """End what runs for it."""
        tasks = [*self._others, *self._readers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def parts(self) -> AsyncGenerator[bytes, None]:
        stop, watch = asyncio.ensure_future(self._pools.stopping.wait()), asyncio.ensure_future(self._watch())
        get = asyncio.ensure_future(self._queue.get())
        self._others = [stop, watch, get]
        yield b": kvpage\n\n"
        while True:
            ends: set[asyncio.Future[Any]] = {stop, get} if watch.done() else {stop, watch, get}
            done, _ = await asyncio.wait(ends, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED)
            if get in done:
                told = get.result()
                if told is None:
                    return
                get = asyncio.ensure_future(self._queue.get())
                self._others = [stop, watch, get]
                yield self._rendered(told)
            elif stop in done:
                return
            elif watch in done:
                watch.result()  # its bug, if it has one; else the end comes through the queue
            else:
                yield b": nothing new\n\n"

    def _rendered(self, told: _Told) -> bytes:
        if told.cursor is not None:
            self._cursors[told.pool_id] = told.cursor
        elif isinstance(told.data, PoolEvent) and told.data.state == "deleted":
            self._cursors.pop(told.pool_id, None)
        data = msgspec.json.encode(told.data)
        return f"event: {told.kind}\nid: {as_word(self._cursors)}\ndata: ".encode() + data + b"\n\n"

    # --- pools --------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        for pool_id in list(self._cursors)[:MAX_POOLS]:
            self._shown[pool_id] = PoolEvent(pool_id=pool_id, name="", device="", state="ready")
        while True:
            await self._look()
            if self._pool_id is not None and self._pool_id not in self._shown:
                await self._queue.put(None)
                return
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        if not all(pools.link.is_ready for pools in self._pools.each):
            return  # a pool that is not listed now need not have gone
        try:
            listed = await self._pools.pools()
        except KvpageError:  # of a worker that has ended just now
            return
        there = {pool.pool_id: pool for pool in listed if self._pool_id in (None, pool.pool_id)}
        for pool in there.values():
            await self._show(pool)
        for pool_id in self._cursors.keys() - there.keys() - self._shown.keys():
            del self._cursors[pool_id]  # a name that a reader has made up would be said with every event
        for pool_id in self._shown.keys() - there.keys():
            before = self._shown.pop(pool_id)
            if pool_id in self._readers:
                self._readers.pop(pool_id).cancel()
            gone = msgspec.structs.replace(before, state="deleted")
            await self._queue.put(_Told("pool", gone, pool_id, None))

    async def _show(self, pool: PoolState) -> None:
        state = PoolEvent(pool_id=pool.pool_id, name=pool.name, device=pool.device, state=pool.state)
        cursor = None
        if pool.state == "ready" and pool.pool_id not in self._readers:
            cursor = self._cursors.get(pool.pool_id) or await self._now(pool.pool_id)
        if self._shown.get(pool.pool_id) != state:
            self._shown[pool.pool_id] = state
            await self._queue.put(_Told("pool", state, pool.pool_id, cursor))
        if cursor is not None:
            self._readers[pool.pool_id] = asyncio.ensure_future(self._read(pool.pool_id, cursor))

    async def _now(self, pool_id: str) -> Cursor | None:
        """After the last event; None for a pool without contents."""
        try:
            owner = await self._pools.owner(pool_id)
            last = await owner.link.ask(leasing.ReadEvents(pool_id=pool_id), leasing.EventList)
        except KvpageError:  # the next look may find more
            return None
        return Cursor(last.log_id, last.after)

    # --- contents -----------------------------------------------------------------------------------------------------

    async def _read(self, pool_id: str, cursor: Cursor) -> None:
        while True:
            try:
                owner = await self._pools.owner(pool_id)
                with closing(await owner.link.open_apart()) as worker:
                    while True:
                        cursor = await self._read_some(worker, pool_id, cursor)
            except NotSupported:
                return
            except KvpageError:  # it may pass: a worker has a successor, with another log; `_look` sees pools that go
                await asyncio.sleep(RETRY_S)

    async def _read_some(self, worker: AsyncWorker, pool_id: str, cursor: Cursor) -> Cursor:
        body = leasing.ReadEvents(
            pool_id=pool_id, log_id=cursor.log_id, after=cursor.number, at_most=EVENTS_AT_ONCE, wait_s=_WAIT_S
        )
        page = await worker.ask(body, leasing.EventList, wait_s=_WAIT_S)
        if page.has_missed:
            last = await worker.ask(leasing.ReadEvents(pool_id=pool_id), leasing.EventList)
            cursor = Cursor(last.log_id, last.after)
            await self._queue.put(_Told("missed", MissedEvents(pool_id=pool_id), pool_id, cursor))
            return cursor
        for event in page.events:
            data = ContentEvent(
                pool_id=pool_id, number=event.number, group=event.group, hashes=unpacked_hashes(event.hashes)
            )
            await self._queue.put(_Told(event.kind, data, pool_id, Cursor(page.log_id, event.number)))
        return Cursor(page.log_id, page.after)
