"""What has changed between two looks at a fleet."""

from __future__ import annotations

import pytest

from kvpage.client.fleet_resources import Fleet, FleetNode, FleetPlan, Place
from kvpage.fleet.manager import FleetManager, Watch
from kvpage.fleet.state import changes, nodes_of
from support.eventually import until
from support.memory_fleet import manager_of, small_fleet
from support.plan_requests import small_request


def plan_of(state: str, unreachable: tuple[str, ...] = ()) -> FleetPlan:
    return FleetPlan(
        id="fleet-0123456789abcdef", name="mimo", state=state, num_blocks=1, world_size=0, ranks=(),  # type: ignore[arg-type]
        unreachable=unreachable,
    )  # fmt: skip


def test_a_change_says_what_was_and_what_is() -> None:
    node = FleetNode(name="a", state="ready")
    before, after = Fleet(nodes=(node,), plans=(plan_of("ready"),)), Fleet(nodes=(), plans=(plan_of("degraded"),))
    seen = [(event.kind, event.subject, event.before, event.after) for event in changes(before, after, "now")]
    assert seen == [("node", "a", "ready", ""), ("plan", "mimo (fleet-0123456789abcdef)", "ready", "degraded")]
    assert changes(after, after, "now") == []


def test_a_node_that_only_a_plan_knows_is_lost() -> None:
    nodes = nodes_of({}, {"b": "no answer"}, ["c"], [plan_of("degraded", ("a", "b"))])
    assert [(node.name, node.state) for node in nodes] == [("a", "lost"), ("b", "silent"), ("c", "no-allocator")]


def test_a_plan_of_which_no_node_answers_is_still_shown_by_who_saw_it() -> None:
    fleet = small_fleet()
    manager = manager_of(fleet)
    manager.plan(small_request(ranks=[{}, {}]), "mimo", [Place(node="n0000", device=f"cuda:{one}") for one in (0, 1)])
    manager.mend()
    fleet.nodes_by_name["n0000"].reachable = False
    shown = manager.mend()
    assert {node.name: node.state for node in shown.nodes}["n0000"] == "lost"
    assert [(plan.state, {rank.state for rank in plan.ranks}) for plan in shown.plans] == [
        ("degraded", {"unreachable"})
    ]
    assert manager_of(fleet).status().plans == ()  # nobody told that one
    fleet.nodes_by_name["n0000"].reachable = True
    assert manager.mend().plans[0].state == "ready"


def test_a_watch_tells_each_event_once_and_mends() -> None:
    fleet = small_fleet()
    manager: FleetManager = manager_of(fleet)
    places = [Place(node=name, device="cuda:0") for name in ("n0000", "n0001")]
    manager.plan(small_request(ranks=[{}, {}]), "mimo", places)
    manager.mend()
    told: list[str] = []
    watch = Watch(manager, interval_s=0.01, on_event=lambda event: told.append(f"{event.subject} {event.after}"))
    try:
        fleet.nodes_by_name["n0000"].reachable = False
        until(lambda: "n0000 lost" in told)
        fleet.nodes_by_name["n0000"].lose()
        fleet.nodes_by_name["n0000"].reachable = True
        until(lambda: any(line.startswith("mimo") and line.endswith(") ready") for line in told))
    finally:
        watch.close()
    assert len(told) == len(set(told))
    assert manager.plan_status("mimo").state == "ready"


@pytest.mark.parametrize("force", [False, True])
def test_down_gives_all_plans_back(force: bool) -> None:
    fleet = small_fleet()
    manager = manager_of(fleet)
    manager.plan(small_request(ranks=[{}, {}]), "mimo")
    manager.plan(small_request(), "other")
    assert manager.down(force=force) == []
    assert not [kept for node in fleet.nodes_by_name.values() for kept in node.records.all()]
