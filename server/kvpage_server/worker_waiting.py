"""Requests that are answered later: when a pool's state changes, or when their time is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvpage.errors import KvpageError
from kvpage.wire.messages import ReplyBody
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_loop import Loop, Timer
from kvpage_server.worker_pool_entry import Pool

Answer: TypeAlias = ReplyBody | KvpageError


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    connection: Connection
    request_id: int
    on_removed: Answer
    timer: Timer | None = None


class Waiting:
    """Who waits for which pool."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiters: dict[Pool, list[_Waiter]] = {}

    def __repr__(self) -> str:
        return f"<Waiting {sum(map(len, self._waiters.values()))} requests>"

    def add(
        self,
        pool: Pool,
        connection: Connection,
        request_id: int,
        *,
        on_removed: Answer,
        timeout_s: float | None = None,
        on_timeout: Callable[[], Answer | None] | None = None,
    ) -> None:
        """Answer the request when the pool settles, or with `on_removed` when it is gone, or when time is over, which
        `on_timeout` answers later if it returns None."""
        connection.require_room_to_wait()
        waiter = _Waiter(connection=connection, request_id=request_id, on_removed=on_removed)
        if timeout_s is not None and on_timeout is not None:
            late_answer = on_timeout
            waiter.timer = self._loop.call_after(timeout_s, lambda: self._time_out(pool, waiter, late_answer))
        connection.num_waits += 1
        self._waiters.setdefault(pool, []).append(waiter)

    def settled(self, pool: Pool, answer: ReplyBody) -> None:
        """The pool has become ready or failed."""
        for waiter in self._take(pool):
            _answer(waiter, answer)

    def removed(self, pool: Pool) -> None:
        for waiter in self._take(pool):
            _answer(waiter, waiter.on_removed)

    def take(self, pool: Pool) -> list[tuple[Connection, int]]:
        """Stop waiting for the pool, without an answer; each connection with the request it still expects one to."""
        return [(waiter.connection, waiter.request_id) for waiter in self._take(pool)]

    def end_all(self, error: KvpageError) -> None:
        for pool in list(self._waiters):
            for waiter in self._take(pool):
                _answer(waiter, error)

    def forget(self, connection: Connection) -> None:
        """Nobody is there to be answered any more."""
        for pool in list(self._waiters):
            for waiter in [waiter for waiter in self._waiters[pool] if waiter.connection is connection]:
                self._drop(pool, waiter)

    def _time_out(self, pool: Pool, waiter: _Waiter, answer: Callable[[], Answer | None]) -> None:
        self._drop(pool, waiter)
        late = answer()
        if late is not None:
            _answer(waiter, late)

    def _take(self, pool: Pool) -> list[_Waiter]:
        waiters = list(self._waiters.get(pool, ()))
        for waiter in waiters:
            self._drop(pool, waiter)
        return waiters

    def _drop(self, pool: Pool, waiter: _Waiter) -> None:
        self._waiters[pool].remove(waiter)
        if not self._waiters[pool]:
            del self._waiters[pool]
        waiter.connection.num_waits -= 1
        if waiter.timer is not None:
            waiter.timer.cancel()


def _answer(waiter: _Waiter, answer: Answer) -> None:
    if isinstance(answer, KvpageError):
        waiter.connection.fail(waiter.request_id, answer)
    else:
        waiter.connection.reply(waiter.request_id, answer)
