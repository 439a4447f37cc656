"""Steps of leases that wait for room, served in fair order (`admission`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvpage.errors import KvpageError, OutOfBlocks
from kvpage.pages.admission import Admission, Verdict
from kvpage.pages.batches import whole_number
from kvpage.pages.holdings import SharesUsedUp
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease, QuotaExceeded
from kvpage.pages.shortage import Fragmented
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
    counts: Counts
    work: Work
    answer: Answer | None
    since_s: float
    shortage: OutOfBlocks | None = None
    """Why it was not served when it was tried last."""
    result: Any = None
    is_waiting: bool = True
    has_waited: bool = False
    """It was not served at once."""


@dataclass(slots=True)
class WaitCounts:
    """Of one tenant: since the pool was opened here. Waited = served + given up + failed + those that wait now."""

    waited: int = 0
    """Requests that had to wait."""
    served: int = 0
    given_up: int = 0
    failed: int = 0
    """Those that were refused when their turn came."""
    waited_s: float = 0.0
    """All of them together, those that wait now not counted."""


class WaitingRoom:
    """Everything that takes blocks goes through here, so that nobody overtakes those who wait. One thread at a time.

    Answers are called when nothing is under way any more: they may do anything here. All are called, even if one
    raises, which then goes on to whoever caused them to be called.
    """

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
        try:
            self._room.pump(self._try)
        finally:
            if self._room.remove(ticket):
                self._room.pump(self._try)  # it may have stood before others that fit
            self._tell()
        if ticket.is_waiting:
            raise ticket.shortage or self._after_others()
        if isinstance(ticket.result, KvpageError):
            raise ticket.result
        return ticket.result

    def wait(self, lease: Lease, counts: Counts, work: Work, answer: Answer) -> Ticket | None:
        """Have `answer` called when `work` was done, now or later; None: it has been called. Raises `OutOfBlocks` for
        what can never be done, `SpecInvalid` for what are no counts of blocks; `answer` is not called then.
        """
        self._check_possible(lease, counts)
        ticket = self._enter(lease, counts, work, answer)
        try:
            self._room.pump(self._try)
            ticket.has_waited = ticket.is_waiting
            self._counts_of(ticket).waited += ticket.is_waiting
        except BaseException:
            self._room.remove(ticket)
            raise
        finally:
            self._tell()
        return ticket if ticket.is_waiting else None

    def give_up(self, ticket: Ticket) -> OutOfBlocks:
        """It waits no more and `answer` is not called; if it was served in this moment, that stays done. Returns why it
        was not served."""
        self.give_up_all([ticket])
        return ticket.shortage or self._after_others()

    def give_up_all(self, tickets: Iterable[Ticket]) -> None:
        """None of them waits any more, or is served because another of them has given up."""
        left = []
        for ticket in tickets:
            ticket.answer = None
            if self._room.remove(ticket):
                left.append(ticket)
        for ticket in left:
            ticket.is_waiting = False
            counts = self._counts_of(ticket)
            counts.given_up += 1
            counts.waited_s += self._clock() - ticket.since_s
        if left:
            self.room_was_made()

    def room_was_made(self) -> None:
        """Blocks were given back, or settings changed: serve those who wait, as far as there is room."""
        if self._room.num_waiting():
            try:
                self._room.pump(self._try)
            finally:
                self._tell()

    def _enter(self, lease: Lease, counts: Counts, work: Work, answer: Answer | None) -> Ticket:
        ticket = Ticket(lease, counts, work, answer, self._clock())
        self._room.add(ticket, lease.tenant, self._pool.usage.bytes_of(self._checked(counts)))
        return ticket

    def _try(self, ticket: Ticket) -> Verdict:
        try:
            result = ticket.work()
        except SharesUsedUp as error:  # no block that is given back helps
            self._finish(ticket, error)
            return Verdict.DROPPED
        except OutOfBlocks as error:
            return self._short(ticket, error)
        except KvpageError as error:
            self._finish(ticket, error)
            return Verdict.DROPPED
        self._finish(ticket, result)
        return Verdict.SERVED

    def _short(self, ticket: Ticket, error: OutOfBlocks) -> Verdict:
        ticket.shortage = error
        try:
            self._check_possible(ticket.lease, ticket.counts)
        except OutOfBlocks as never:  # its tenant's quota has become smaller
            self._finish(ticket, never)
            return Verdict.DROPPED
        # Who waits for blocks that follow each other may wait for ever while others come and go: it stops nobody else.
        return Verdict.OVER_QUOTA if isinstance(error, QuotaExceeded | Fragmented) else Verdict.SHORT

    def _finish(self, ticket: Ticket, result: Any) -> None:
        ticket.result, ticket.is_waiting = result, False
        self._finished.append(ticket)

    def _tell(self) -> None:
        """Call those who are finished."""
        finished, self._finished = self._finished, []
        with ExitStack() as each:
            for ticket in reversed(finished):
                each.callback(self._tell_one, ticket)

    def _tell_one(self, ticket: Ticket) -> None:
        if ticket.has_waited:
            counts = self._counts_of(ticket)
            counts.failed += isinstance(ticket.result, KvpageError)
            counts.served += not isinstance(ticket.result, KvpageError)
            counts.waited_s += self._clock() - ticket.since_s
        if ticket.answer is not None:
            ticket.answer(ticket.result)

    def _counts_of(self, ticket: Ticket) -> WaitCounts:
        return self.counts.setdefault(ticket.lease.tenant, WaitCounts())

    def _after_others(self) -> OutOfBlocks:
        num_waiting = self._room.num_waiting()
        return OutOfBlocks(
            f"{num_waiting} requests wait for blocks before this one; wait too, or free some blocks",
            details={"num_waiting": num_waiting},
        )

    def _checked(self, counts: Counts) -> Counts:
        """Raises `SpecInvalid` for a group that is not there, or what is no number of blocks."""
        for group, count in counts.items():
            self._pool.blocks.counts(group)
            whole_number(count, "the number of blocks")
        return counts

    def _check_possible(self, lease: Lease, counts: Counts) -> None:
        """Raises `OutOfBlocks` for more than the pool has, or the tenant may ever hold."""
        geometry = self._pool.geometry
        slabs = sum(-(-count // geometry.blocks_per_slab[group]) for group, count in self._checked(counts).items())
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
