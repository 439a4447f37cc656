"""A running worker's side of its replacement: it stops serving, gives everything away, and ends.

    serving ──TakeOver──► frozen ──FinishTakeOver──► gone
       ▲                    │
       └─ the taker leaves ─┘   or says nothing for too long

While it is frozen nobody is answered but the taker: clients and those who connect wait in their sockets, and go on
with whoever serves next. Only `FinishTakeOver` makes that the successor, so at no time do two workers serve.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Iterable

from kvpage.errors import Conflict, NotFound
from kvpage.wire import succession
from kvpage_server.worker_connection import Connection
from kvpage_server.worker_endpoint import Endpoint
from kvpage_server.worker_log import log
from kvpage_server.worker_loop import Deadline, Loop
from kvpage_server.worker_pools import PoolTable


class Handover:
    """At most one at a time."""

    def __init__(
        self,
        endpoint: Endpoint,
        pools: PoolTable,
        loop: Loop,
        *,
        accept: Callable[[], None],
        connections: Callable[[], Iterable[Connection]],
        end_waiting: Callable[[], None],
        let_go: Callable[[], None],
        patience_s: float,
    ) -> None:
        """`accept` is what the loop does for the listening socket; `end_waiting` leaves no request to be answered
        later; after `let_go` nothing of any pool changes here; `patience_s` is how long whoever takes over may say
        nothing.
        """
        self._endpoint = endpoint
        self._pools = pools
        self._loop = loop
        self._accept = accept
        self._connections = connections
        self._end_waiting = end_waiting
        self._let_go = let_go
        self._taker: Connection | None = None
        self._moving: list[Connection] = []
        self._until_heard = Deadline(loop, patience_s, self._give_up)
        self.is_finished = False

    @property
    def is_under_way(self) -> bool:
        return self._taker is not None

    def begin(self, connection: Connection, request_id: int) -> None:
        connection.require_api()
        connection.require_acknowledged()
        if self.is_under_way:
            raise Conflict("another worker is taking over from this one already")
        self._require_settled()
        self._taker = connection
        self._until_heard.start()
        self._end_waiting()
        self._loop.watch(self._endpoint.socket, 0, self._accept)
        self._moving = [other for other in self._connections() if other is not connection]
        for other in self._moving:
            other.pause()
        log("handing_over", num_pools=len(self._pools), num_clients=len(self._moving))
        reply = succession.TakenOver(
            pool_ids=[pool.pool_id for pool in self._pools if pool.state == "ready"],
            num_connections=len(self._moving),
            next_hold_id=self._pools.next_hold_id,
            memory_limit_bytes=self._pools.budget.limit_bytes,
        )
        connection.reply(request_id, reply, [self._endpoint.export_socket()])

    def heard(self, connection: Connection) -> None:
        """A request has come; from whoever takes over it is a sign of life."""
        if connection is self._taker:
            self._until_heard.cancel()
            self._until_heard.start()

    def give_connection(self, connection: Connection, request_id: int, number: int) -> None:
        self._require_taker(connection)
        connection.require_acknowledged()
        if number >= len(self._moving):
            raise NotFound(f"there are {len(self._moving)} connections, none has number {number}")
        moving = self._moving[number]
        if not moving.is_movable:
            moving.close()
        fds = [] if moving.closed else [os.dup(moving.fileno())]
        connection.reply(request_id, moving.packed(), fds)

    def finish(self, connection: Connection, request_id: int) -> None:
        self._require_taker(connection)
        connection.require_acknowledged()
        # The lock goes last: whoever has a copy of its descriptor keeps others out, alive or stuck, until it ends.
        lock_fd = self._endpoint.export_lock()
        self._endpoint.disown()
        self.is_finished = True
        self._let_go()
        log("handed_over", num_pools=len(self._pools), num_clients=len(self._moving))
        connection.reply(request_id, succession.TakeOverFinished(), [lock_fd])
        connection.end()

    def disconnected(self, connection: Connection) -> None:
        """The taker leaves: that is the end of this worker, or of the handover."""
        if connection is not self._taker:
            return
        if self.is_finished:
            self._loop.stop()
            return
        self._taker = None
        self._until_heard.cancel()
        log("handover_taken_back", level="warning")
        self._endpoint.listen_again()
        self._loop.watch(self._endpoint.socket, selectors.EVENT_READ, self._accept)
        moving, self._moving = self._moving, []
        for other in moving:
            other.resume()

    def _give_up(self) -> None:
        assert self._taker is not None  # `disconnected` cancels the deadline
        log("client_closed", level="warning", client_pid=self._taker.peer.pid, reason="it took over too slowly")
        self._taker.close()

    def _require_settled(self) -> None:
        for pool in self._pools:
            if pool.state in ("creating", "deleting"):
                raise Conflict(
                    f"pool {pool.pool_id} is {pool.state}; wait for it and ask again",
                    details={"pool_id": pool.pool_id, "state": pool.state},
                )

    def _require_taker(self, connection: Connection) -> None:
        if connection is not self._taker:
            raise Conflict("this connection has not begun to take over")
