"""Two phases, marks that decide, and what becomes of a plan when a node or a coordinator goes away in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvpage.client.fleet_resources import Place
from kvpage.errors import Conflict, DeviceUnavailable, NotEnoughMemory, NotFound, SpecInvalid
from kvpage.fleet import messages
from kvpage.fleet.coordinator import Coordinator
from kvpage.fleet.messages import Message
from simulated_fleet import CoordinatorDiedError, MemoryTransport
from support.memory_fleet import manager_of, small_fleet
from support.plan_requests import small_request

REQUEST = small_request(ranks=[{}, {}, {}])
PLACES = [Place(node=f"n000{index}", device="cuda:0") for index in range(3)]


class Watched(MemoryTransport):
    """Calls `before` with each message to a node."""

    before: Any = None

    def ask(self, questions: Any, *, timeout_s: float) -> Any:
        answers: dict[str, Any] = {}
        for name, message in questions.items():
            if self.before is not None:
                self.before(name, message)
            answers |= super().ask({name: message}, timeout_s=timeout_s)
        return answers


@pytest.fixture
def fleet() -> Watched:
    made = small_fleet()
    return Watched(made.nodes_by_name, made.rng)


def ids() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"fleet-{number:016x}"


NUMBERED = ids()


def coordinator(fleet: MemoryTransport, ttl_s: float = 1e9) -> Coordinator:
    return Coordinator(fleet, new_id=lambda: next(NUMBERED), reservation_ttl_s=ttl_s)


def kept(fleet: MemoryTransport) -> list[str]:
    """Names of pools, and phases of records, on all nodes."""
    nodes = fleet.nodes_by_name.values()
    pools = [pool.name for node in nodes for pool in node.service.pools()]
    return pools + [one.record.phase for node in nodes for one in node.records.all()]


def at(kind: type[Message], node: str, happens: Any) -> Any:
    def before(name: str, message: Message) -> None:
        if isinstance(message, kind) and name == node:
            happens()

    return before


def raising(error: BaseException) -> Any:
    def happens() -> None:
        raise error

    return happens


def test_all_ranks_have_the_blocks_of_the_device_with_the_least_left(fleet: Watched) -> None:
    request = {name: value for name, value in REQUEST.items() if name != "memory_bytes"}
    alone = coordinator(fleet).create(small_request(memory_bytes=32 << 20), "alone", [PLACES[1]])
    plan = coordinator(fleet).create(request, "mimo", PLACES)
    assert plan.num_blocks < coordinator(fleet).create(request, "other", [
        Place(node=name, device="cuda:1") for name in fleet.nodes_by_name
    ]).num_blocks  # fmt: skip
    assert len({rank.plan_id for rank in plan.ranks}) == 1
    assert alone.state == plan.state == "ready"


def test_the_same_request_finds_the_plan_and_another_of_that_name_is_refused(fleet: Watched) -> None:
    first = coordinator(fleet).create(REQUEST, "mimo")
    assert coordinator(fleet).create(REQUEST, "mimo") == first
    with pytest.raises(Conflict, match=first.id):
        coordinator(fleet).create(small_request(), "mimo")


def test_a_node_that_goes_away_while_it_reserves_leaves_nothing(fleet: Watched) -> None:
    node = fleet.nodes_by_name["n0001"]
    fleet.before = at(messages.Reserve, "n0001", lambda: setattr(node, "reachable", False))
    with pytest.raises(DeviceUnavailable, match="n0001"):
        coordinator(fleet).create(REQUEST, "mimo", PLACES)
    assert kept(fleet) == []


def test_who_is_interrupted_while_nodes_reserve_leaves_nothing(fleet: Watched) -> None:
    fleet.before = at(messages.Reserve, "n0002", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        coordinator(fleet).create(REQUEST, "mimo", PLACES)
    assert kept(fleet) == []


def test_an_answer_that_is_lost_leaves_a_reservation_until_the_node_answers(fleet: Watched) -> None:
    node = fleet.nodes_by_name["n0002"]
    working = coordinator(fleet)

    def before(name: str, message: Message) -> None:
        if isinstance(message, messages.Reserve) and name == "n0002":
            node.allocator.handle(messages.encode(message))  # it is done, and nobody hears of it
            node.reachable = False

    fleet.before = before
    with pytest.raises(DeviceUnavailable, match="given back when they do"):
        working.create(REQUEST, "mimo", PLACES)
    assert len(kept(fleet)) == 2  # a pool and its record
    fleet.before = None
    node.reachable = True
    working.mend()
    assert kept(fleet) == []


def test_a_coordinator_that_dies_before_any_commit_leaves_what_the_next_undoes(fleet: Watched) -> None:
    fleet.before = at(messages.Commit, "n0000", raising(CoordinatorDiedError()))
    with pytest.raises(CoordinatorDiedError):
        coordinator(fleet).create(REQUEST, "mimo", PLACES)
    fleet.before = None
    assert coordinator(fleet).standing("mimo").state == "reserving"
    coordinator(fleet).mend()
    assert len(kept(fleet)) == 6  # somebody may be at work on it
    coordinator(fleet, ttl_s=-1).mend()
    assert kept(fleet) == []


def test_a_coordinator_that_dies_after_one_commit_has_decided(fleet: Watched) -> None:
    fleet.before = at(messages.Commit, "n0001", raising(CoordinatorDiedError()))
    with pytest.raises(CoordinatorDiedError):
        coordinator(fleet).create(REQUEST, "mimo", PLACES)
    fleet.before = None
    assert coordinator(fleet, ttl_s=-1).mend() == {}
    assert coordinator(fleet).standing("mimo").state == "ready"


def test_a_node_lost_at_its_commit_leaves_the_plan_in_doubt_until_it_answers(fleet: Watched) -> None:
    node = fleet.nodes_by_name["n0000"]
    fleet.before = at(messages.Commit, "n0000", lambda: setattr(node, "reachable", False))
    with pytest.raises(DeviceUnavailable) as refusal:
        coordinator(fleet).create(REQUEST, "mimo", PLACES)
    assert refusal.value.details["state"] == "in-doubt"
    fleet.before = None
    old = coordinator(fleet, ttl_s=-1)
    assert old.standing("mimo").state == "in-doubt"
    old.mend()
    assert len(kept(fleet)) == 6
    with pytest.raises(Conflict, match="in doubt until n0000"):
        old.delete("mimo")
    node.reachable = True
    old.mend()
    assert kept(fleet) == []


def test_what_is_in_doubt_can_be_forced_away(fleet: Watched) -> None:
    node = fleet.nodes_by_name["n0000"]
    fleet.before = at(messages.Commit, "n0000", lambda: setattr(node, "reachable", False))
    with pytest.raises(DeviceUnavailable):
        coordinator(fleet).create(REQUEST, "mimo", PLACES)
    fleet.before = None
    assert coordinator(fleet, ttl_s=-1).delete("mimo", force=True) is None
    node.lose()
    node.reachable = True
    assert kept(fleet) == []


def test_no_abort_undoes_what_is_committed(fleet: Watched) -> None:
    plan = coordinator(fleet).create(REQUEST, "mimo", PLACES)
    answers = fleet.ask({"n0000": messages.Abort(id=plan.id)}, timeout_s=1)
    assert isinstance(answers["n0000"], messages.Failed)
    assert coordinator(fleet).standing("mimo") == plan


def test_a_node_that_lost_its_memory_is_mended_and_no_other_is_asked(fleet: Watched) -> None:
    plan = coordinator(fleet).create(REQUEST, "mimo", PLACES)
    fleet.nodes_by_name["n0001"].lose()
    asked: list[str] = []
    fleet.before = lambda name, message: asked.append(name) if isinstance(message, messages.Restore) else None
    coordinator(fleet).mend()
    after = coordinator(fleet).standing("mimo")
    assert asked == ["n0001"]
    assert after.state == "ready"
    assert [old == new for old, new in zip(plan.ranks, after.ranks, strict=True)] == [True, False, True]
    assert [rank.plan_id for rank in after.ranks] == [rank.plan_id for rank in plan.ranks]


def test_what_cannot_be_mended_is_said(fleet: Watched) -> None:
    plan = coordinator(fleet).create(REQUEST, "mimo", PLACES)
    fleet.nodes_by_name["n0001"].lose()
    coordinator(fleet).create(small_request(memory_bytes=61 << 20), "in-the-way", [PLACES[1]])
    [fault] = coordinator(fleet).mend()[plan.id]
    assert "n0001" in fault
    assert manager_of(fleet).mend().undone[plan.id]


def test_a_plan_given_back_while_a_node_is_away_does_not_come_back_with_it(fleet: Watched) -> None:
    coordinator(fleet).create(REQUEST, "mimo", PLACES)
    fleet.nodes_by_name["n0002"].reachable = False
    left = coordinator(fleet).delete("mimo")
    assert left is not None
    assert (left.state, left.unreachable) == ("releasing", ("n0002",))
    again = coordinator(fleet).create(small_request(), "mimo", [PLACES[0]])  # the name is free
    fleet.nodes_by_name["n0002"].reachable = True
    coordinator(fleet).mend()
    assert coordinator(fleet).standings(coordinator(fleet).look()) == [again]


def test_a_plan_that_is_not_there_is_not_found(fleet: Watched) -> None:
    with pytest.raises(NotFound):
        coordinator(fleet).standing("mimo")
    with pytest.raises(NotFound):
        coordinator(fleet).delete("mimo")


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 65, "é"])
def test_a_name_that_no_file_should_have_is_refused(fleet: Watched, name: str) -> None:
    with pytest.raises(SpecInvalid, match="cannot name"):
        coordinator(fleet).create(REQUEST, name)


def test_more_ranks_than_devices_are_refused(fleet: Watched) -> None:
    with pytest.raises(NotEnoughMemory, match="7 ranks"):
        coordinator(fleet).create(small_request(ranks=[{}] * 7), "mimo")


def test_ranks_of_a_stage_share_a_node_where_there_is_room(fleet: Watched) -> None:
    pairs = coordinator(fleet).create(small_request(ranks=[{}] * 2), "pair")
    assert len({rank.node for rank in pairs.ranks}) == 1
    assert [rank.device for rank in pairs.ranks] == ["cuda:0", "cuda:1"]
