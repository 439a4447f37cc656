"""Ending a worker when nobody holds its pools any more, and not before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpage.errors import Conflict, Draining
from kvpage.wire import succession
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_log import log
from kvpage_server.worker_loop import Loop, Timer
from kvpage_server.worker_pool_entry import held
from kvpage_server.worker_pools import PoolTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    connection: Connection
    request_id: int
    timer: Timer


class Retirement:
    """Begun by `DrainWorker`, taken back when time is over or whoever asked has gone."""

    def __init__(
        self, pools: PoolTable, loop: Loop, *, num_keepers: Callable[[], int], end: Callable[[], None]
    ) -> None:
        """`num_keepers`: connections of role `api`. `end` begins the worker's end."""
        self._pools = pools
        self._loop = loop
        self._num_keepers = num_keepers
        self._end = end
        self._asked: _Asked | None = None

    @property
    def is_under_way(self) -> bool:
        return self._asked is not None

    def require_serving(self) -> None:
        """Raises `Draining` while the worker waits to end."""
        if self.is_under_way:
            raise Draining(f"the worker of device {self._pools.device} takes nothing new and ends soon; try again then")

    def begin(self, connection: Connection, request_id: int, body: succession.DrainWorker) -> None:
        connection.require_api()
        if self.is_under_way:
            raise Conflict("the worker is draining already")
        if len(self._pools) and self._num_keepers() < 2 and not body.lose_pools:  # who asks is one of them
            raise Conflict(
                f"nobody else keeps the {len(self._pools)} pools of this worker; delete them, start `kvpage serve`,"
                " replace the worker, or give --lose-pools",
                details={"num_pools": len(self._pools)},
            )
        timer = self._loop.call_after(body.timeout_s, self._run_out)
        self._asked = _Asked(connection=connection, request_id=request_id, timer=timer)
        log("draining", num_pools=len(self._pools), timeout_s=body.timeout_s)
        self.hold_released()

    def hold_released(self) -> None:
        """Called whenever a hold has ended."""
        if self._asked is None or any(pool.is_held for pool in self._pools):
            return
        asked, self._asked = self._asked, None
        asked.timer.cancel()
        asked.connection.reply(asked.request_id, succession.WorkerDrained(num_pools=len(self._pools)))
        self._end()

    def disconnected(self, connection: Connection) -> None:
        if self._asked is not None and self._asked.connection is connection:
            self._take_back()

    def _run_out(self) -> None:
        asked = self._take_back()
        pool = next(pool for pool in self._pools if pool.is_held)
        asked.connection.fail(asked.request_id, held(pool))

    def _take_back(self) -> _Asked:
        assert self._asked is not None  # both callers have seen it
        asked, self._asked = self._asked, None
        asked.timer.cancel()
        log("draining_taken_back", level="warning")
        return asked
