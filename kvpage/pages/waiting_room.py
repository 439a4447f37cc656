"""Steps of leases that wait for room, served in fair order (`admission`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvpage.errors import KvpageError, OutOfBlocks
from kvpage.pages.admission import Admission, Verdict
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease, QuotaExceeded
from kvpage.pages.steps import Counts

QUANTUM_BYTES = 64 << 20

Work = Callable[[], Any]
"""Does it, and returns what it gives; raises `OutOfBlocks` where there is no room."""
Answer = Callable[[Any], None]
"""Is called with what `Work` returned, or with the `KvpageError` that it raised."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One who waits."""

    lease: Lease
    work: Work
    answer: Answer | None
    since_s: float
    shortage: OutOfBlocks | None = None
    """Why it was not served when it was tried last."""
    result: Any = None


@dataclass(slots=True)
class WaitCounts:
    """Of one tenant: since the pool was opened here."""

    waited: int = 0
    """Requests that had to wait."""
    served: int = 0
    given_up: int = 0
    waited_s: float = 0.0
    """All of them together, those that wait now not counted."""


class WaitingRoom:
    """Everything that takes blocks goes through here, so that nobody overtakes those who wait. One thread at a time."""

    def __init__(self, pool: LeasedPool, clock: Callable[[], float] = monotonic) -> None:
        self._pool, self._clock = pool, clock
        self._room: Admission[Ticket] = Admission(pool.book.tenant, QUANTUM_BYTES)
        self._finished: list[Ticket] = []
        self.counts: dict[str, WaitCounts] = {}
        """By tenant that ever waited."""

    def __repr__(self) -> str:
        return f"<WaitingRoom {self._room!r}>"

    def num_waiting(self, tenant: str | None = None) -> int:
        """Requests; of all tenants for None."""
        return self._room.num_waiting(tenant)

    def now(self, lease: Lease, counts: Counts, work: Work) -> Any:
        """What `work`, which takes so many blocks by group, returns. Raises what it raises, and `OutOfBlocks` where
        others wait before it.
        """
        if not self._room.num_waiting() or not any(counts.values()):
            return work()
        ticket = self._enter(lease, counts, work, None)
        self._pump()
        is_left = self._room.remove(ticket)
        if is_left:
            self._pump()  # it may have stood before others that fit
        self._tell()
        if is_left:
            raise ticket.shortage or self._after_others()
        if isinstance(ticket.result, KvpageError):
            raise ticket.result
        return ticket.result

    def wait(self, lease: Lease, counts: Counts, work: Work, answer: Answer) -> Ticket | None:
        """Have `answer` called when `work` was done, now or later; None: it has been called. Raises `OutOfBlocks` for
        what can never be done.
        """
        self._check_possible(lease, counts)
        ticket = self._enter(lease, counts, work, answer)
        self._pump()
        is_waiting = ticket in self._room
        if is_waiting:
            self._counts_of(lease).waited += 1
        self._tell()
        return ticket if is_waiting else None

    def give_up(self, ticket: Ticket) -> OutOfBlocks:
        """It waits no more and `answer` is not called. Returns why it was not served."""
        if self._room.remove(ticket):
            counts = self._counts_of(ticket.lease)
            counts.given_up += 1
            counts.waited_s += self._clock() - ticket.since_s
            self.room_was_made()
        return ticket.shortage or self._after_others()

    def room_was_made(self) -> None:
        """Blocks were given back, or settings changed: serve those who wait, as far as there is room."""
        if self._room.num_waiting():
            self._pump()
            self._tell()

    def _enter(self, lease: Lease, counts: Counts, work: Work, answer: Answer | None) -> Ticket:
        ticket = Ticket(lease, work, answer, self._clock())
        self._room.add(ticket, lease.tenant, self._pool.usage.bytes_of(counts))
        return ticket

    def _pump(self) -> None:
        self._room.pump(self._try)

    def _try(self, ticket: Ticket) -> Verdict:
        try:
            ticket.result = ticket.work()
        except QuotaExceeded as error:
            ticket.shortage = error
            return Verdict.OVER_QUOTA
        except OutOfBlocks as error:
            ticket.shortage = error
            return Verdict.SHORT
        except KvpageError as error:
            ticket.result = error
            self._finished.append(ticket)
            return Verdict.DROPPED
        self._finished.append(ticket)
        return Verdict.SERVED

    def _tell(self) -> None:
        """Call those who were served; they may do anything here."""
        finished, self._finished = self._finished, []
        now_s = self._clock()
        for ticket in finished:
            if ticket.answer is not None:
                counts = self._counts_of(ticket.lease)
                counts.served += 1
                counts.waited_s += now_s - ticket.since_s
                ticket.answer(ticket.result)

    def _counts_of(self, lease: Lease) -> WaitCounts:
        return self.counts.setdefault(lease.tenant, WaitCounts())

    def _after_others(self) -> OutOfBlocks:
        num_waiting = self._room.num_waiting()
        return OutOfBlocks(
            f"{num_waiting} requests wait for blocks before this one; wait too, or free some blocks",
            details={"num_waiting": num_waiting},
        )

    def _check_possible(self, lease: Lease, counts: Counts) -> None:
        """Raises `OutOfBlocks` for more than the pool has, or the tenant may ever hold."""
        geometry = self._pool.geometry
        slabs = sum(-(-count // geometry.blocks_per_slab[group]) for group, count in counts.items())
        if slabs > geometry.num_slabs - 1:
            raise OutOfBlocks(
                f"{sum(counts.values())} blocks need {slabs} slabs; the whole pool has {geometry.num_slabs - 1}: make a"
                " larger one, or ask for less",
                details={"slabs_wanted": slabs, "slabs_available": geometry.num_slabs - 1},
            )
        quota_bytes, needed = self._pool.book.tenant(lease.tenant).quota_bytes, self._pool.usage.bytes_of(counts)
        if quota_bytes is not None and needed > quota_bytes:
            raise QuotaExceeded(
                f"{needed} bytes of blocks are more than the whole quota of tenant {lease.tenant or '(default)'},"
                f" {quota_bytes}; raise it, or ask for less",
                details={"tenant": lease.tenant, "wanted_bytes": needed, "quota_bytes": quota_bytes},
            )
