"""The waiting room: who is served, in which order, and that nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpage.errors import Conflict, InternalError, SpecInvalid
from kvpage.pages.admission import Admission, Verdict
from kvpage.pages.tenants import Tenant

SERVED, SHORT, OVER_QUOTA, DROPPED = Verdict.SERVED, Verdict.SHORT, Verdict.OVER_QUOTA, Verdict.DROPPED


class Trial(NamedTuple):
    request: str
    verdict: Verdict


class Waiter(NamedTuple):
    request: str
    tenant: str
    cost_bytes: int


class Failed(Exception):
    """What a caller's own code raises."""


def room_of(*tenants: Tenant, quantum_bytes: int = 1) -> Admission[str]:
    return Admission({tenant.name: tenant for tenant in tenants}.__getitem__, quantum_bytes)


def add(room: Admission[str], text: str) -> None:
    """Requests such as "a1:30 a2:0 b1:7": the first letter is the tenant, the number after the colon the cost."""
    for word in text.split():
        request, cost = word.split(":")
        room.add(request, request[0], int(cost))


def pump(room: Admission[str], verdict_of: Callable[[str], Verdict] = lambda _: SERVED) -> list[str]:
    """Who was tried."""
    tried: list[str] = []

    def try_to_serve(request: str) -> Verdict:
        tried.append(request)
        return verdict_of(request)

    room.pump(try_to_serve)
    return tried


def verdicts(**by_request: Verdict) -> Callable[[str], Verdict]:
    """SERVED for those not named."""
    return lambda request: by_request.get(request, SERVED)


# --- the order --------------------------------------------------------------------------------------------------------


def test_one_tenant_is_served_in_the_order_of_arrival_whatever_it_costs() -> None:
    room = room_of(Tenant(name="a"))
    add(room, "a1:9 a2:0 a3:50 a4:1")
    assert pump(room) == ["a1", "a2", "a3", "a4"]
    assert pump(room) == []


def test_tenants_of_one_priority_take_turns_of_a_quantum_times_their_weight() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b", weight=3), quantum_bytes=10)
    add(room, "a1:10 a2:10 a3:10 b1:10 b2:10 b3:10 b4:10 b5:10")
    assert pump(room) == ["a1", "b1", "b2", "b3", "a2", "b4", "b5", "a3"]


def test_what_a_turn_leaves_is_kept_for_the_next() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"), quantum_bytes=10)
    add(room, "a1:6 a2:6 a3:6 a4:2 b1:10 b2:10 b3:10")
    assert pump(room) == ["a1", "b1", "a2", "a3", "a4", "b2", "b3"]


def test_what_is_left_is_gone_when_the_last_request_of_a_tenant_is() -> None:
    """Else a tenant could save for a burst by asking for little."""
    room = room_of(Tenant(name="a"), Tenant(name="b"), quantum_bytes=10)
    add(room, "a1:1")
    assert pump(room) == ["a1"]
    add(room, "a2:19 b1:10 b2:10")  # 9 bytes saved would pay for a2 in the first turn
    assert pump(room) == ["b1", "a2", "b2"]


def test_a_higher_priority_is_served_before_a_lower_one() -> None:
    room = room_of(Tenant(name="a", priority=-5, weight=1000), Tenant(name="b"), Tenant(name="c", priority=5))
    add(room, "a1:1 b1:1 c1:100 b2:1 c2:100")
    assert pump(room) == ["c1", "c2", "b1", "b2", "a1"]


def test_requests_that_cost_nothing_are_served_in_their_order_too() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"))
    add(room, "a1:0 a2:2 a3:0 b1:0 b2:0")
    assert pump(room) == ["a1", "b1", "b2", "a2", "a3"]


def test_the_tenant_without_a_name_is_one_like_others() -> None:
    room = room_of(Tenant(name=""), Tenant(name="b"))
    room.add("x", "", 1)
    add(room, "b1:1")
    room.add("y", "", 1)
    assert room.num_waiting("") == 2
    assert pump(room) == ["x", "b1", "y"]


def test_a_cost_of_many_quanta_takes_one_step() -> None:
    """2^40 laps would never end, and neither would this test."""
    room = room_of(Tenant(name="a"), Tenant(name="b"), Tenant(name="c", weight=1000))
    add(room, f"a1:{2**40} a2:{2**40} b1:{2**41} b2:3 c1:{1500 * 2**40}")  # paid for after 1, 2, 2 and 1.5 times 2^40
    assert pump(room) == ["a1", "c1", "a2", "b1", "b2"]


class Counted:
    """A request that counts how often it is looked at."""

    looks = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        type(self).looks += 1
        return self.number

    def __eq__(self, other: object) -> bool:
        type(self).looks += 1
        return self is other


def looks_to_serve(num_requests: int) -> int:
    room: Admission[Counted] = Admission(lambda name: Tenant(name=name), 3)
    for number in range(num_requests):
        room.add(Counted(number), "ab"[number % 2], 1 + number % 5)
    Counted.looks = 0
    room.pump(lambda _: SERVED)
    return Counted.looks


def test_the_work_for_one_request_does_not_grow_with_the_number_that_wait() -> None:
    assert looks_to_serve(2000) <= 11 * looks_to_serve(200)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_when_the_pool_is_short_nobody_of_equal_or_lower_priority_passes() -> None:
    room = room_of(Tenant(name="a", priority=1), Tenant(name="b", priority=1), Tenant(name="c"))
    add(room, "a1:1 a2:1 b1:1 c1:1")
    assert pump(room, verdicts(b1=SHORT)) == ["a1", "b1"]
    assert list(room) == ["a2", "b1", "c1"]


def test_the_next_pump_begins_with_who_was_short_and_its_turn_goes_on() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"), quantum_bytes=4)
    add(room, "a1:2 a2:2 a3:2 b1:4")
    for _ in range(3):  # however often: the turn pays for a1 and a2 only
        assert pump(room, verdicts(a1=SHORT)) == ["a1"]
    assert pump(room) == ["a1", "a2", "b1", "a3"]


def test_a_higher_priority_that_comes_later_is_served_before_who_was_short() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b", priority=1))
    add(room, "a1:1")
    assert pump(room, verdicts(a1=SHORT)) == ["a1"]
    add(room, "b1:1")
    assert pump(room) == ["b1", "a1"]


def test_a_tenant_over_its_quota_stops_nobody_else() -> None:
    room = room_of(Tenant(name="a", priority=1), Tenant(name="b", priority=1), Tenant(name="c"))
    add(room, "a1:1 a2:1 b1:1 b2:1 c1:1")
    assert pump(room, verdicts(a1=OVER_QUOTA)) == ["a1", "b1", "b2", "c1"]
    assert list(room) == ["a1", "a2"]


def test_a_tenant_over_its_quota_saves_nothing_up() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"), quantum_bytes=2)
    add(room, "a1:2 a2:2 a3:2 b1:2 b2:100")
    assert pump(room, verdicts(a1=OVER_QUOTA, b2=SHORT)) == ["a1", "b1", "b2"]
    for _ in range(5):
        assert pump(room, verdicts(a1=OVER_QUOTA, b2=SHORT)) == ["b2"]
    add(room, "b3:2 b4:2")
    assert pump(room) == ["b2", "a1", "b3", "a2", "b4", "a3"]


def test_what_is_dropped_is_gone_and_nobody_has_paid() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"), quantum_bytes=5)
    add(room, "a1:5 a2:5 a3:5 b1:5")
    assert pump(room, verdicts(a1=DROPPED)) == ["a1", "a2", "b1", "a3"]
    assert list(room) == []


def test_dropping_the_last_request_ends_the_turn_and_the_deficit() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"), quantum_bytes=5)
    add(room, "a1:5")
    assert pump(room, verdicts(a1=DROPPED)) == ["a1"]
    add(room, "b1:5 a2:5")
    assert pump(room) == ["b1", "a2"]


def test_when_trying_raises_the_request_stays_the_first_and_the_error_goes_on() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"), Tenant(name="c"), quantum_bytes=2)
    add(room, "a1:2 a2:2 b1:2 b2:2 c1:1")

    def fails_at_b1(request: str) -> Verdict:
        if request == "b1":
            raise Failed
        return OVER_QUOTA if request == "a2" else SERVED

    with pytest.raises(Failed):
        room.pump(fails_at_b1)
    assert list(room) == ["a2", "b1", "b2", "c1"]
    assert pump(room) == ["b1", "c1", "a2", "b2"]


def test_tenants_over_their_quota_are_not_lost_when_trying_raises() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"))
    add(room, "a1:1 b1:1")

    def try_to_serve(request: str) -> Verdict:
        if request == "b1":
            raise Failed
        return OVER_QUOTA

    with pytest.raises(Failed):
        room.pump(try_to_serve)
    assert pump(room) == ["b1", "a1"]


# --- giving up --------------------------------------------------------------------------------------------------------


def test_who_gave_up_is_not_tried() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"))
    add(room, "a1:1 a2:1 a3:1 b1:1")
    assert room.remove("a2")
    assert room.remove("b1")
    assert not room.remove("b1")
    assert not room.remove("never added")
    assert pump(room) == ["a1", "a3"]


def test_a_tenant_keeps_its_deficit_when_one_of_several_gives_up_and_loses_it_with_the_last() -> None:
    for others, order in (("a2:10", ["a2", "b1", "a3", "b2"]), ("", ["b1", "a3", "b2"])):
        room = room_of(Tenant(name="a"), Tenant(name="b"), quantum_bytes=10)
        add(room, f"a1:10 {others} b1:10 b2:10")
        assert pump(room, verdicts(a1=SHORT)) == ["a1"]
        room.remove("a1")
        add(room, "a3:10")
        assert pump(room) == order


def test_who_gave_up_and_comes_back_waits_behind_the_others() -> None:
    room = room_of(Tenant(name="a"))
    add(room, "a1:1 a2:1")
    room.remove("a1")
    add(room, "a1:1")
    assert list(room) == ["a2", "a1"]
    assert pump(room) == ["a2", "a1"]


# --- what can be asked ------------------------------------------------------------------------------------------------


def test_who_waits_is_counted_and_listed_in_the_order_of_arrival() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b", priority=9))
    assert (room.num_waiting(), room.num_waiting("a"), list(room)) == (0, 0, [])
    add(room, "a1:1 b1:1 a2:1")
    assert (room.num_waiting(), room.num_waiting("a"), room.num_waiting("b")) == (3, 2, 1)
    assert list(room) == ["a1", "b1", "a2"]
    assert repr(room) == "<Admission: 3 requests of 2 tenants wait>"


def test_requests_may_be_removed_while_they_are_listed() -> None:
    room = room_of(Tenant(name="a"))
    add(room, "a1:1 a2:1 a3:1")
    for request in room:
        room.remove(request)
    assert room.num_waiting() == 0


def test_who_waits_may_be_asked_during_a_pump() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"))
    add(room, "a1:1 a2:1 b1:1")
    seen = []

    def try_to_serve(request: str) -> Verdict:
        seen.append((request, room.num_waiting(), list(room)))
        return OVER_QUOTA if request == "a1" else SERVED

    room.pump(try_to_serve)
    assert seen == [("a1", 3, ["a1", "a2", "b1"]), ("b1", 3, ["a1", "a2", "b1"])]


# --- settings that change ---------------------------------------------------------------------------------------------


def test_settings_hold_from_the_next_pump_on() -> None:
    tenants = {name: Tenant(name=name) for name in "ab"}
    room: Admission[str] = Admission(tenants.__getitem__, 1)
    add(room, "a1:1 a2:1 a3:1 a4:1 b1:1 b2:1 b3:1")
    assert pump(room, verdicts(b1=SHORT)) == ["a1", "b1"]
    tenants["b"] = Tenant(name="b", weight=2)
    assert pump(room, verdicts(a3=SHORT)) == ["b1", "a2", "b2", "b3", "a3"]
    tenants["a"] = Tenant(name="a", priority=-1)
    add(room, "b4:1")
    assert pump(room) == ["b4", "a3", "a4"]


def test_a_tenant_comes_last_in_its_new_class_with_no_deficit() -> None:
    tenants = {"a": Tenant(name="a", priority=1), "b": Tenant(name="b")}
    room: Admission[str] = Admission(tenants.__getitem__, 10)
    add(room, "a1:30 a2:10 b1:10 b2:10 b3:10 b4:10")
    assert pump(room, verdicts(a1=SHORT)) == ["a1"]  # it has 30 bytes, and its turn
    tenants["a"] = Tenant(name="a")
    assert pump(room) == ["b1", "b2", "b3", "a1", "b4", "a2"]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantum_bytes", [0, -1])
def test_a_quantum_that_pays_for_nothing_is_refused(quantum_bytes: int) -> None:
    with pytest.raises(SpecInvalid):
        room_of(quantum_bytes=quantum_bytes)


def test_a_negative_cost_is_refused() -> None:
    room = room_of(Tenant(name="a"))
    with pytest.raises(SpecInvalid):
        room.add("a1", "a", -1)
    assert room.num_waiting() == 0


def test_a_request_that_waits_is_not_added_again() -> None:
    room = room_of(Tenant(name="a"), Tenant(name="b"))
    add(room, "a1:1")
    for tenant in "ab":
        with pytest.raises(Conflict):
            room.add("a1", tenant, 5)
    assert (room.num_waiting("a"), room.num_waiting("b")) == (1, 0)
    assert pump(room) == ["a1"]


def test_a_tenant_that_is_unknown_is_refused_as_its_settings_are() -> None:
    tenants = {"a": Tenant(name="a"), "b": Tenant(name="b")}
    room: Admission[str] = Admission(tenants.__getitem__, 1)
    with pytest.raises(KeyError):
        room.add("c1", "c", 1)
    add(room, "a1:1 b1:1")
    del tenants["b"]
    with pytest.raises(KeyError):
        pump(room)
    assert list(room) == ["a1", "b1"]  # nobody was served by half
    tenants["b"] = Tenant(name="b")
    assert pump(room) == ["a1", "b1"]


REENTRIES: dict[str, Callable[[Admission[str]], object]] = {
    "add": lambda room: room.add("a3", "a", 1),
    "remove": lambda room: room.remove("a2"),
    "pump": lambda room: room.pump(lambda _: SERVED),
}


@pytest.mark.parametrize("name", REENTRIES)
def test_a_room_is_not_changed_from_within_its_own_pump(name: str) -> None:
    room = room_of(Tenant(name="a"))
    add(room, "a1:1 a2:1")

    def try_to_serve(_: str) -> Verdict:
        REENTRIES[name](room)
        return SERVED

    with pytest.raises(InternalError):
        room.pump(try_to_serve)
    assert list(room) == ["a1", "a2"]
    assert pump(room) == ["a1", "a2"]


# --- the share of each ------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """Two tenants that are served one request after the other until one has none left."""

    weights: tuple[int, int]
    costs: tuple[list[int], list[int]]
    quantum_bytes: int

    @property
    def largest(self) -> int:
        return max(max(costs) for costs in self.costs)


def leads(load: Load, order: Iterable[tuple[int, int]]) -> list[int]:
    """After each of the requests (tenant, place), while both had one waiting: the bytes served to the first tenant
    less those served to the second, per unit of weight, times both weights."""
    served, found = [0, 0], [0]
    left = [len(costs) for costs in load.costs]
    for tenant, place in order:
        if not all(left):
            break
        served[tenant] += load.costs[tenant][place]
        left[tenant] -= 1
        found.append(served[0] * load.weights[1] - served[1] * load.weights[0])
    return found


def is_within_bounds(load: Load, found: list[int]) -> bool:
    """Those that the module states."""
    first, second = load.weights
    quantum, largest = load.quantum_bytes * first * second, load.largest
    from_the_start = max(map(abs, found)) <= quantum + largest * max(first, second)
    return from_the_start and max(found) - min(found) <= quantum + largest * (first + second)


def serve(load: Load, pauses: set[int]) -> list[tuple[int, int]]:
    """In which order. `pauses`: numbers of the trials at which the pool is short; pumps go on until all are served."""
    tenants = [Tenant(name=str(tenant), weight=weight) for tenant, weight in enumerate(load.weights)]
    room: Admission[tuple[int, int]] = Admission(lambda name: tenants[int(name)], load.quantum_bytes)
    for tenant, costs in enumerate(load.costs):
        for place, cost in enumerate(costs):
            room.add((tenant, place), str(tenant), cost)
    order: list[tuple[int, int]] = []
    num_trials = 0

    def try_to_serve(request: tuple[int, int]) -> Verdict:
        nonlocal num_trials
        num_trials += 1
        if num_trials in pauses:
            return SHORT
        order.append(request)
        return SERVED

    while room.num_waiting():
        room.pump(try_to_serve)
    return order


COSTS = st.integers(0, 100) | st.sampled_from([0, 1, 99, 100])
WEIGHTS = st.integers(1, 7) | st.sampled_from([50, 1000])
LOADS = st.builds(
    Load,
    weights=st.tuples(WEIGHTS, WEIGHTS),
    costs=st.tuples(st.lists(COSTS, min_size=1, max_size=60), st.lists(COSTS, min_size=1, max_size=60)),
    quantum_bytes=st.integers(1, 150),
)


@given(load=LOADS, pauses=st.sets(st.integers(1, 150), max_size=20))
def test_two_tenants_that_wait_get_their_weights_shares_up_to_the_bound(load: Load, pauses: set[int]) -> None:
    order = serve(load, pauses)
    assert is_within_bounds(load, leads(load, order))
    for tenant, costs in enumerate(load.costs):
        assert [place for who, place in order if who == tenant] == list(range(len(costs)))


def test_the_check_of_the_bound_fires_for_who_is_served_in_the_order_of_arrival() -> None:
    load = Load(weights=(1, 4), costs=([10] * 50, [10] * 50), quantum_bytes=10)
    alternately = [(tenant, place) for place in range(50) for tenant in (0, 1)]
    assert not is_within_bounds(load, leads(load, alternately))
    assert is_within_bounds(load, leads(load, serve(load, set())))


def test_the_bound_is_no_larger_than_it_must_be() -> None:
    """Some load comes within a tenth of it."""
    load = Load(weights=(1, 1), costs=([99] * 9, [100] * 9), quantum_bytes=99)
    bound = load.quantum_bytes + load.largest
    assert max(map(abs, leads(load, serve(load, set())))) >= 0.9 * bound


# --- nobody starves ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("large", ["a", "b"])
def test_a_request_for_the_whole_pool_is_served_though_small_ones_keep_coming(large: str) -> None:
    """A pool of 10 bytes is full of requests of 1 byte. Each time one of them ends, two more come."""
    room = room_of(Tenant(name="a"), Tenant(name="b"))
    held: list[int] = [1] * 10
    served = []
    costs = {"large": 10}
    room.add("large", large, 10)

    def try_to_serve(request: str) -> Verdict:
        if sum(held) + costs[request] > 10:
            return SHORT
        held.append(costs[request])
        served.append(request)
        return SERVED

    for step in range(100):
        for number in (2 * step, 2 * step + 1):
            costs[f"small {number}"] = 1
            room.add(f"small {number}", "a", 1)
        if held:
            held.pop(0)
        room.pump(try_to_serve)
        if "large" in served:
            break
    assert "large" in served
    assert len(served) <= 11  # the small ones that a lap of ten turns lets pass


# --- against an oracle ------------------------------------------------------------------------------------------------


@dataclass
class Naive:
    """Deficit round robin as it is told, turn by turn: no lap is skipped, and everything is looked for in lists."""

    tenants: dict[str, Tenant]
    quantum_bytes: int
    waiting: list[Waiter] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    """Tenants that have somebody waiting, of all classes, in the order of their turns."""
    priorities: dict[str, int] = field(default_factory=dict)
    """Of those, in the order in which they began to wait."""
    deficits: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    def add(self, waiter: Waiter) -> None:
        self.waiting.append(waiter)
        if waiter.tenant not in self.line:
            self.join(waiter.tenant)

    def remove(self, request: str) -> None:
        self.take_off(next(waiter for waiter in self.waiting if waiter.request == request))

    def join(self, tenant: str) -> None:
        self.line.append(tenant)
        self.priorities[tenant] = self.tenants[tenant].priority
        self.deficits[tenant] = 0
        self.begun.discard(tenant)

    def of(self, tenant: str) -> list[Waiter]:
        return [waiter for waiter in self.waiting if waiter.tenant == tenant]

    def take_off(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        if not self.of(waiter.tenant):
            self.line.remove(waiter.tenant)
            del self.priorities[waiter.tenant]

    def pump(self, try_to_serve: Callable[[str], Verdict]) -> None:
        for tenant in list(self.priorities):
            if self.priorities[tenant] != self.tenants[tenant].priority:
                self.line.remove(tenant)
                self.join(tenant)
        over_quota: list[str] = []
        try:
            while able := [tenant for tenant in self.line if tenant not in over_quota]:
                highest = max(self.priorities[tenant] for tenant in able)
                tenant = next(tenant for tenant in able if self.priorities[tenant] == highest)
                if not self.have_turn(tenant, try_to_serve, over_quota):
                    return
        finally:
            for tenant in over_quota:
                self.to_the_end(tenant)

    def to_the_end(self, tenant: str) -> None:
        self.line.remove(tenant)
        self.line.append(tenant)

    def have_turn(self, tenant: str, try_to_serve: Callable[[str], Verdict], over_quota: list[str]) -> bool:
        """Whether the pump may go on."""
        if tenant not in self.begun:
            self.begun.add(tenant)
            self.deficits[tenant] += self.quantum_bytes * self.tenants[tenant].weight
        while mine := self.of(tenant):
            if mine[0].cost_bytes > self.deficits[tenant]:
                self.begun.remove(tenant)
                self.to_the_end(tenant)
                return True
            verdict = try_to_serve(mine[0].request)
            if verdict is SHORT:
                return False
            if verdict is OVER_QUOTA:
                over_quota.append(tenant)
                return True
            if verdict is SERVED:
                self.deficits[tenant] -= mine[0].cost_bytes
            self.take_off(mine[0])
        return True


CAPACITY_BYTES = 60
NAMES = ("", "a", "b", "c")
QUOTAS = st.integers(0, CAPACITY_BYTES) | st.none()
TENANTS = st.fixed_dictionaries(
    {
        name: st.builds(
            Tenant,
            name=st.just(name),
            quota_bytes=QUOTAS,
            priority=st.integers(-1, 1),
            weight=st.integers(1, 4),
        )
        for name in NAMES
    }
)


@dataclass
class Pool:
    """Has room or not, and quotas; requests are doomed or not; a trial may fail."""

    waiters: dict[str, Waiter] = field(default_factory=dict)
    """All there ever were."""
    tenants: dict[str, Tenant] = field(default_factory=dict)
    doomed: set[str] = field(default_factory=set)
    holders: list[Waiter] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    """Since the last pump began."""
    failing_trial: int = 0
    """1: the first fails; 0: none does."""

    def held_bytes(self, tenant: str | None = None) -> int:
        return sum(holder.cost_bytes for holder in self.holders if tenant in (None, holder.tenant))

    def verdict_of(self, waiter: Waiter) -> Verdict:
        quota_bytes = self.tenants[waiter.tenant].quota_bytes
        if waiter.request in self.doomed:
            return DROPPED
        if quota_bytes is not None and self.held_bytes(waiter.tenant) + waiter.cost_bytes > quota_bytes:
            return OVER_QUOTA
        return SHORT if self.held_bytes() + waiter.cost_bytes > CAPACITY_BYTES else SERVED

    def try_to_serve(self, request: str) -> Verdict:
        if len(self.trials) + 1 == self.failing_trial:
            raise Failed
        waiter = self.waiters[request]
        verdict = self.verdict_of(waiter)
        self.trials.append(Trial(request, verdict))
        if verdict is SERVED:
            self.holders.append(waiter)
        return verdict

    def pump(self, pump: Callable[[Callable[[str], Verdict]], None], failing_trial: int) -> bool:
        """Whether a trial failed."""
        self.trials, self.failing_trial = [], failing_trial
        try:
            pump(self.try_to_serve)
        except Failed:
            return True
        return False


class WaitingRoom(RuleBasedStateMachine):
    @initialize(tenants=TENANTS, quantum_bytes=st.integers(1, 40))
    def open(self, tenants: dict[str, Tenant], quantum_bytes: int) -> None:
        self.tenants = tenants
        self.room: Admission[str] = Admission(self.tenants.__getitem__, quantum_bytes)
        self.naive = Naive(self.tenants, quantum_bytes)
        self.pool = Pool(tenants=self.tenants)
        self.ended = Counter[str]()
        """Requests that were served, dropped or gave up, each as often."""

    @rule(
        tenant=st.sampled_from(NAMES),
        costs=st.lists(st.integers(0, CAPACITY_BYTES) | st.integers(0, 5), min_size=1, max_size=8),
        is_doomed=st.sampled_from([False, False, False, True]),
    )
    def add(self, tenant: str, costs: list[int], is_doomed: bool) -> None:
        for cost_bytes in costs:
            waiter = Waiter(f"{tenant}{len(self.pool.waiters)}", tenant, cost_bytes)
            self.pool.waiters[waiter.request] = waiter
            self.room.add(*waiter)
            self.naive.add(waiter)
        if is_doomed:
            self.pool.doomed.add(waiter.request)

    @precondition(lambda self: self.room.num_waiting())
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.room)), "request")
        self.ended[request] += 1
        assert self.room.remove(request)
        self.naive.remove(request)
        assert not self.room.remove(request)

    @precondition(lambda self: self.pool.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, len(self.pool.holders)), "number")):
            self.pool.holders.pop(data.draw(st.integers(0, len(self.pool.holders) - 1), "holder"))

    @rule(changed=TENANTS, names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=2))
    def change_settings(self, changed: dict[str, Tenant], names: set[str]) -> None:
        self.tenants |= {name: changed[name] for name in names}

    @rule(failing_trial=st.sampled_from([0, 0, 0, 1, 2, 5]))
    def pump(self, failing_trial: int) -> None:
        before = list(self.room)
        holders = self.pool.holders.copy()
        has_failed = self.pool.pump(self.room.pump, failing_trial)
        trials, after = self.pool.trials, self.pool.holders
        self.pool.holders = holders
        assert self.pool.pump(self.naive.pump, failing_trial) == has_failed
        assert trials == self.pool.trials
        assert after == self.pool.holders
        self.ended.update(trial.request for trial in trials if trial.verdict in (SERVED, DROPPED))
        self.check(before, trials, has_failed)

    def check(self, before: list[str], trials: list[Trial], has_failed: bool) -> None:
        """What must hold of any fair room, whatever its turns are. `before`: who waited, in the order of arrival."""
        left = before.copy()
        over_quota: set[str] = set()
        for number, (request, verdict) in enumerate(trials, 1):
            tenant = self.pool.waiters[request].tenant
            mine = [other for other in left if self.pool.waiters[other].tenant == tenant]
            assert request == mine[0], "overtaken within a tenant"
            able = {self.pool.waiters[other].tenant for other in left} - over_quota
            assert tenant in able, "tried again after its quota was met"
            highest = max(self.tenants[other].priority for other in able)
            assert self.tenants[tenant].priority == highest, "served before a higher priority"
            if verdict is SHORT:
                assert number == len(trials), "passed who was short"
                assert not has_failed
            elif verdict is OVER_QUOTA:
                over_quota.add(tenant)
            else:
                left.remove(request)
        assert list(self.room) == left
        if not has_failed and not (trials and trials[-1].verdict is SHORT):
            assert {self.pool.waiters[other].tenant for other in left} == over_quota, "who could go on was not tried"

    @invariant()
    def nobody_is_lost_or_doubled(self) -> None:
        waiting = list(self.room)
        assert Counter(waiting) + self.ended == Counter(list(self.pool.waiters))
        assert waiting == [waiter.request for waiter in self.naive.waiting]
        assert self.room.num_waiting() == len(waiting)
        for name in NAMES:
            mine = [request for request in waiting if self.pool.waiters[request].tenant == name]
            assert self.room.num_waiting(name) == len(mine)

    def teardown(self) -> None:
        """When room returns and quotas allow it, each pump serves at least one, and so everybody in the end."""
        for name in NAMES:
            self.tenants[name] = Tenant(name=name, priority=self.tenants[name].priority)
        while waiting := self.room.num_waiting():
            self.pool.holders.clear()
            self.pump(failing_trial=0)
            assert self.room.num_waiting() < waiting
        self.nobody_is_lost_or_doubled()


TestWaitingRoom = WaitingRoom.TestCase
TestWaitingRoom.settings = settings(
    max_examples=settings().max_examples // 2,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
