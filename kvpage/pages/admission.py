"""The waiting room of a pool: who is served next once there is room. Decisions only: no clock, no blocks, no I/O.

    room = Admission(tenant_of, quantum_bytes=64 << 20)
    room.add(request, "search", cost_bytes=3 << 20)
    room.pump(try_to_serve)  # called with one request after the other; what it answers is a `Verdict`

Tenants of a higher priority come strictly first. Those of one priority, a *class*, take turns by deficit round robin
(M. Shreedhar, G. Varghese: Efficient Fair Queuing Using Deficit Round Robin, SIGCOMM 1995). Requests of one tenant are
served in the order in which they came.

A turn begins with `quantum_bytes` · weight more in the tenant's *deficit*, and lasts while that pays for the tenant's
first request. What is left is kept for its next turn, and is gone once the tenant has no request waiting. In one *lap*
of a class everybody has one turn. Laps in which nobody can pay are counted, not walked.

So, while two tenants of a class both have requests waiting and neither meets its quota, the bytes served to each per
unit of its weight differ, over any stretch of time, by at most `quantum_bytes` + C / weight + C / the other weight,
where C is the largest cost. If both begin to wait at once, it is `quantum_bytes` + C / the smaller weight from there
on: the lighter is at most C + `quantum_bytes` · its weight from its share.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Generic, TypeVar, assert_never

from kvpage.errors import Conflict, InternalError, SpecInvalid, shorten
from kvpage.pages.tenants import Tenant

R = TypeVar("R", bound=Hashable)


class Verdict(Enum):
    """What came of a request that was tried."""

    SERVED = auto()
    """It waits no more, and its tenant has paid for it."""
    SHORT = auto()
    """The pool lacks the room now. The pump ends, and the next one begins with it, after whoever has a higher priority:
    if others could pass, large requests would starve."""
    OVER_QUOTA = auto()
    """Its tenant may hold no more now: nobody of that tenant is tried again in this pump. Others are."""
    DROPPED = auto()
    """It failed, as its caller has been told: it waits no more, and nobody has paid."""


@dataclass(slots=True, eq=False)
class _Queue(Generic[R]):
    """Of a tenant that has requests waiting."""

    tenant: str
    priority: int
    share_bytes: int
    """What a turn adds to the deficit."""
    costs: OrderedDict[R, int] = field(default_factory=OrderedDict)
    """Bytes; who came first is first. No plain dict: to find its first entry it walks over all that are gone."""
    deficit_bytes: int = 0
    has_turn: bool = False
    """Its turn has begun, so that the deficit has the share already, and has not ended."""

    def lap(self) -> int:
        """In which lap from now on it can pay for its first request: 1 or more."""
        cost = next(iter(self.costs.values()))
        num_shares = -((self.deficit_bytes - cost) // self.share_bytes)
        return max(1, num_shares + self.has_turn)

    def have_turns(self, count: int) -> None:
        """Of so many laps, one each. The first may have begun already; all of them end."""
        self.deficit_bytes += (count - self.has_turn) * self.share_bytes
        self.has_turn = False


_Ring = deque[_Queue[R]]
"""A class. The first has the turn, or has the next one."""


class Admission(Generic[R]):
    """See the module. One thread at a time. A request is told from others as the key of a dict is.

    To serve one takes, at worst, a look at each tenant of its class; how many requests wait does not matter.
    """

    def __init__(self, tenant_of: Callable[[str], Tenant], quantum_bytes: int) -> None:
        """`tenant_of`: asked for the settings of a tenant that begins to wait, and for all that wait at each pump.
        `quantum_bytes`: what a turn gives to a tenant of weight 1. Raises `SpecInvalid`.
        """
        if quantum_bytes < 1:
            raise SpecInvalid(f"a quantum of {quantum_bytes} bytes never pays for anything; it must be 1 or more")
        self._tenant_of, self._quantum_bytes = tenant_of, quantum_bytes
        self._waiting: dict[R, _Queue[R]] = {}  # in the order of arrival
        self._queues: dict[str, _Queue[R]] = {}
        self._rings: defaultdict[int, _Ring[R]] = defaultdict(deque)  # by priority
        self._is_pumping = False

    def __repr__(self) -> str:
        return f"<Admission: {len(self._waiting)} requests of {len(self._queues)} tenants wait>"

    def __iter__(self) -> Iterator[R]:
        """Who waits now, in the order of arrival. Whoever iterates may add and remove."""
        return iter(tuple(self._waiting))

    def num_waiting(self, tenant: str | None = None) -> int:
        """Requests; of all tenants for None."""
        if tenant is None:
            return len(self._waiting)
        queue = self._queues.get(tenant)
        return len(queue.costs) if queue else 0

    def add(self, request: R, tenant: str, cost_bytes: int) -> None:
        """It waits from now on, behind the others of its tenant. Its cost may be 0.

        Raises `SpecInvalid` for a negative cost, `Conflict` if it waits already, `InternalError` from within a pump,
        and what `tenant_of` raises; nothing is changed then.
        """
        self._refuse_in_pump("add")
        if cost_bytes < 0:
            raise SpecInvalid(f"request {shorten(repr(request))} costs {cost_bytes} bytes; it must be 0 or more")
        if request in self._waiting:
            raise Conflict(f"request {shorten(repr(request))} waits already; remove it before it is added again")
        queue = self._queues.get(tenant) or self._new_queue(tenant)
        queue.costs[request] = cost_bytes
        self._waiting[request] = queue

    def remove(self, request: R) -> bool:
        """It gave up. Its tenant keeps the deficit if others of it wait. False if it does not wait.

        Raises `InternalError` from within a pump.
        """
        self._refuse_in_pump("remove")
        if request not in self._waiting:
            return False
        self._take_off(request)
        return True

    def pump(self, try_to_serve: Callable[[R], Verdict]) -> None:
        """Try requests in the fair order until nobody is left who could go on.

        A request that can never be served must be DROPPED, or it stops its tenant or its class for good. If
        `try_to_serve` raises, that ends the pump as SHORT does: the request stays the first of its tenant and has not
        paid, those before it are done, and the error goes on to the caller. If `tenant_of` raises, nobody is tried.

        A tenant whose priority has changed comes last in its new class, with no deficit. Raises `InternalError` from
        within a pump.
        """
        self._refuse_in_pump("pump")
        self._is_pumping = True
        try:
            self._ask_for_settings()
            for priority in sorted(self._rings, reverse=True):
                if not self._serve_class(self._rings[priority], try_to_serve):
                    return
        finally:
            self._is_pumping = False

    def _serve_class(self, ring: _Ring[R], try_to_serve: Callable[[R], Verdict]) -> bool:
        """Whether those of lower priority may be served too."""
        over_quota: list[_Queue[R]] = []
        try:
            while ring:
                queue = _next_to_pay(ring)
                request, cost_bytes = next(iter(queue.costs.items()))
                verdict = try_to_serve(request)
                if verdict is Verdict.SHORT:
                    return False
                if verdict is Verdict.OVER_QUOTA:
                    over_quota.append(ring.popleft())  # its turn goes on in a later pump: no lap pays for it meanwhile
                elif verdict is Verdict.SERVED or verdict is Verdict.DROPPED:
                    queue.deficit_bytes -= cost_bytes if verdict is Verdict.SERVED else 0
                    self._take_off(request)
                else:
                    assert_never(verdict)
            return True
        finally:
            ring.extend(over_quota)

    def _ask_for_settings(self) -> None:
        for name, queue in self._queues.items():
            tenant = self._tenant_of(name)
            queue.share_bytes = self._quantum_bytes * tenant.weight
            if queue.priority != tenant.priority:
                self._rings[queue.priority].remove(queue)
                queue.priority, queue.deficit_bytes, queue.has_turn = tenant.priority, 0, False
                self._rings[queue.priority].append(queue)

    def _new_queue(self, name: str) -> _Queue[R]:
        tenant = self._tenant_of(name)
        queue: _Queue[R] = _Queue(name, tenant.priority, self._quantum_bytes * tenant.weight)
        self._queues[name] = queue
        self._rings[queue.priority].append(queue)
        return queue

    def _take_off(self, request: R) -> None:
        queue = self._waiting.pop(request)
        del queue.costs[request]
        if not queue.costs:
            del self._queues[queue.tenant]
            self._rings[queue.priority].remove(queue)

    def _refuse_in_pump(self, what: str) -> None:
        if self._is_pumping:
            raise InternalError(f"a waiting room cannot {what} from within its own pump; do it afterwards")


def _next_to_pay(ring: _Ring[R]) -> _Queue[R]:
    """Let turns pass until somebody can pay for its first request: the first of `ring` then, whose turn it is."""
    place, lap = 0, ring[0].lap()
    for other, queue in enumerate(ring):
        if lap == 1:
            break
        if queue.lap() < lap:
            place, lap = other, queue.lap()
    for queue in islice(ring, place + 1):
        queue.have_turns(lap)
    if lap > 1:  # those behind have had one turn less
        for queue in islice(ring, place + 1, None):
            queue.have_turns(lap - 1)
    ring.rotate(-place)
    ring[0].has_turn = True
    return ring[0]
