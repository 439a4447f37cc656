"""Work for the planning threads, taken in turns from those who ask: who asks for much waits behind himself only.

Used from the event loop only; the work runs in threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpage.errors import Draining, RateLimited, RequestTimeout

NUM_THREADS = 2  # more would only fight for the interpreter lock
MAX_PENDING = 1024  # as many as connections of one kind; their bodies have bounds of their own
PATIENCE_S = 20.0  # less than the 30 s for which clients wait for an answer

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks, and whether anybody is there to be answered."""

    key: Hashable = None
    """The same for all connections of one process on this machine, or of one address in the network."""
    has_left: Callable[[], bool] = lambda: False


NOBODY = Asker()


def asker_of(scope: Mapping[str, Any]) -> Asker:
    """The connection's, which its protocol has put there."""
    asker = scope.get("state", {}).get("asker", NOBODY)
    assert isinstance(asker, Asker)
    return asker


@dataclass(slots=True, eq=False)
class _Ticket:
    work: Callable[[], Any]
    asker: Asker
    done: asyncio.Future[Any]
    impatience: asyncio.TimerHandle | None = None

    def refuse(self, error: Exception) -> None:
        self.stop_waiting()
        if not self.done.done():
            self.done.set_exception(error)

    def stop_waiting(self) -> None:
        if self.impatience is not None:
            self.impatience.cancel()
            self.impatience = None


class PlanQueue:
    """Owns the threads; `close()` waits for what they are at, no more."""

    def __init__(self, *, max_pending: int = MAX_PENDING, patience_s: float = PATIENCE_S) -> None:
        """`max_pending`: how many may be worked on or wait. `patience_s`: how long one may wait to be begun."""
        self._max_pending = max_pending
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvpage-plan")
        self._num_running = 0
        self._num_waiting = 0
        self._lines: OrderedDict[Hashable, deque[_Ticket]] = OrderedDict()
        """Of each who waits; the first is next."""

    def __repr__(self) -> str:
        return f"<PlanQueue {self._num_running} running, {self._num_waiting} waiting of {len(self._lines)} askers>"

    def close(self) -> None:
        for line in self._lines.values():
            for ticket in line:
                ticket.refuse(Draining("the server is shutting down and computes no further plan"))
        self._lines.clear()
        self._num_waiting = 0
        self._threads.shutdown(cancel_futures=True)

    async def run(self, work: Callable[[], _Result], asker: Asker = NOBODY) -> _Result:
        """What `work` returns or raises. Raises `RateLimited` when there is no place in the queue, or no turn soon."""
        loop = asyncio.get_running_loop()
        ticket = _Ticket(work, asker, loop.create_future())
        self._make_room(asker)
        if self._num_running < NUM_THREADS:
            self._begin(ticket)
        else:
            self._lines.setdefault(asker.key, deque()).append(ticket)
            self._num_waiting += 1
            ticket.impatience = loop.call_later(self._patience_s, self._refuse_waiting, ticket)
        try:
            result: _Result = await ticket.done
        finally:
            self._forget(ticket)
        return result

    def _make_room(self, asker: Asker) -> None:
        """For one more. Where there is none, whoever has by far the most waiting loses the last of it. Raises
        `RateLimited` where that is the one who asks.
        """
        if self._num_running + self._num_waiting < self._max_pending:
            return
        longest = max(self._lines.values(), key=len, default=deque[_Ticket]())
        if len(longest) <= len(self._lines.get(asker.key, ())) + 1:
            raise RateLimited(f"{self._num_waiting} requests wait to be planned; try again shortly")
        last = longest[-1]
        self._forget(last)
        last.refuse(RateLimited(f"{self._num_waiting} requests wait to be planned, most of them yours; send fewer"))

    def _refuse_waiting(self, ticket: _Ticket) -> None:
        self._forget(ticket)
        ticket.refuse(
            RateLimited(
                f"there was no turn to plan this within {self._patience_s:g} s, {self._num_waiting} others wait;"
                " try again shortly"
            )
        )

    def _forget(self, ticket: _Ticket) -> None:
        ticket.stop_waiting()
        line = self._lines.get(ticket.asker.key)
        if line is None or ticket not in line:
            return
        line.remove(ticket)
        self._num_waiting -= 1
        if not line:
            del self._lines[ticket.asker.key]

    def _begin(self, ticket: _Ticket) -> None:
        self._num_running += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, ticket.work)
        running.add_done_callback(lambda ended: self._ended(ticket, ended))

    def _ended(self, ticket: _Ticket, ended: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        if not ticket.done.done():
            if ended.cancelled():
                ticket.done.cancel()
            elif (error := ended.exception()) is not None:
                ticket.done.set_exception(error)
            else:
                ticket.done.set_result(ended.result())
        elif not ended.cancelled():
            ended.exception()  # looked at: nobody is there to be told
        self._begin_next()

    def _begin_next(self) -> None:
        while self._lines and self._num_running < NUM_THREADS:
            key, line = next(iter(self._lines.items()))
            ticket = line[0]
            self._forget(ticket)
            if key in self._lines:
                self._lines.move_to_end(key)
            if ticket.asker.has_left():
                ticket.refuse(RequestTimeout("who asked has hung up, so nothing was planned"))
            elif not ticket.done.done():
                self._begin(ticket)
