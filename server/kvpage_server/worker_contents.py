"""What routers ask a worker: how full a pool is, and which contents came and went."""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.errors import KvpageError, PoolNotFound
from kvpage.wire import leasing
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_loop import Loop, Timer
from kvpage_server.worker_pool_blocks import LeasablePools
from kvpage_server.worker_pool_entry import Pool

MAX_BLOCKS_LOOKED_AT = 20_000  # in one part, which takes some 10 ms in which nobody else is served


@dataclass(slots=True, kw_only=True, eq=False)
class _Reader:
    """One who waits for events."""

    connection: Connection
    request_id: int
    body: leasing.ReadEvents
    timer: Timer


class Contents:
    def __init__(self, blocks: LeasablePools, loop: Loop) -> None:
        self._blocks, self._loop = blocks, loop
        self._readers: list[_Reader] = []
        self._is_posted = False

    def describe(self, connection: Connection, request_id: int, body: leasing.DescribeBlocks) -> None:
        from kvpage_server.blocks_state import describe_blocks

        blocks = self._blocks.by_id(body.pool_id)
        connection.reply(request_id, describe_blocks(body.pool_id, blocks, self._loop.clock()))

    def map(self, connection: Connection, request_id: int, body: leasing.MapBlocks) -> None:
        from kvpage_server.blocks_state import map_blocks

        blocks = self._blocks.by_id(body.pool_id)
        connection.reply(request_id, map_blocks(body.pool_id, blocks, body.max_cells))

    def set_tenants(self, connection: Connection, request_id: int, body: leasing.SetTenants) -> None:
        from kvpage.pages.tenants import Tenant

        connection.require_api()
        blocks = self._blocks.by_id(body.pool_id)
        tenants = [
            Tenant(name=one.name, quota_bytes=one.quota_bytes, priority=one.priority, weight=one.weight)
            for one in body.tenants
        ]
        blocks.pool.book.set_tenants(tenants)
        blocks.room.room_was_made()
        connection.reply(request_id, leasing.TenantsSet(tenants=body.tenants))

    def clear(self, connection: Connection, request_id: int, body: leasing.ClearContents) -> None:
        connection.require_api()
        blocks = self._blocks.by_id(body.pool_id)
        blocks.pool.prefix.clear()
        blocks.room.room_was_made()
        connection.reply(request_id, leasing.ContentsCleared(pool_id=body.pool_id))

    def list(self, connection: Connection, request_id: int, body: leasing.ListContents) -> None:
        blocks = self._blocks.by_id(body.pool_id)
        blocks.pool.blocks.counts(body.group)
        log_id, number = blocks.events.cursor
        num_blocks = blocks.pool.geometry.num_blocks(body.group)
        end = min(body.after_block + 1 + MAX_BLOCKS_LOOKED_AT, num_blocks)
        looked_at = range(body.after_block + 1, end)
        hashes = b"".join(blocks.pool.index.hash_of(body.group, block) or b"" for block in looked_at)
        reply = leasing.ContentList(
            log_id=log_id,
            after=number,
            hashes=hashes,
            last_block=end - 1,
            is_last=end >= num_blocks,
        )
        connection.reply(request_id, reply)

    def read(self, connection: Connection, request_id: int, body: leasing.ReadEvents) -> None:
        events = self._events(body)
        if events.events or events.has_missed or not body.wait_s:
            connection.reply(request_id, events)
            return
        connection.require_room_to_wait()
        connection.num_waits += 1
        if not body.log_id:
            body = leasing.ReadEvents(
                pool_id=body.pool_id, log_id=events.log_id, after=events.after, at_most=body.at_most, wait_s=body.wait_s
            )
        timer = self._loop.call_after(body.wait_s, lambda: self._answer(reader, self._events(reader.body)))
        reader = _Reader(connection=connection, request_id=request_id, body=body, timer=timer)
        self._readers.append(reader)
        self._blocks.by_id(body.pool_id).events.on_append = self._noticed

    def _events(self, body: leasing.ReadEvents) -> leasing.EventList:
        from kvpage.pages.events import Cursor

        log = self._blocks.by_id(body.pool_id).events
        page = log.read(Cursor(body.log_id, body.after) if body.log_id else log.cursor, body.at_most)
        return leasing.EventList(
            log_id=page.cursor.log_id,
            after=page.cursor.number,
            has_missed=page.has_missed,
            events=[
                leasing.ContentEvent(number=event.number, kind=event.kind, group=event.group, hashes=event.data)
                for event in page.events
            ],
        )

    def _noticed(self) -> None:
        """In the middle of a step: look afterwards."""
        if self._readers and not self._is_posted:
            self._is_posted = True
            self._loop.post(self._look)

    def _look(self) -> None:
        self._is_posted = False
        for reader in list(self._readers):
            events = self._events(reader.body)
            if events.events or events.has_missed:
                self._answer(reader, events)

    def _answer(self, reader: _Reader, events: leasing.EventList) -> None:
        self._forget(reader)
        reader.connection.reply(reader.request_id, events)

    def _forget(self, reader: _Reader) -> None:
        reader.timer.cancel()
        self._readers.remove(reader)
        reader.connection.num_waits -= 1

    def pool_gone(self, pool: Pool) -> None:
        """Tell those who wait for events of the pool."""
        for reader in [reader for reader in self._readers if reader.body.pool_id == pool.pool_id]:
            self._forget(reader)
            reader.connection.fail(reader.request_id, PoolNotFound(f"pool {pool.pool_id} is not there any more"))

    def disconnected(self, connection: Connection) -> None:
        for reader in [reader for reader in self._readers if reader.connection is connection]:
            self._forget(reader)

    def end_waiting(self, error: KvpageError) -> None:
        """Leave nobody waiting."""
        for reader in list(self._readers):
            self._forget(reader)
            reader.connection.fail(reader.request_id, error)
