"""The whole fleet at one moment, and what has changed between two. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec

from kvpage.client.fleet_resources import Fleet, FleetEvent, FleetEventKind, FleetNode, FleetPlan, FleetPlanState
from kvpage.fleet.records import NodeReport


def nodes_of(
    reports: Mapping[str, NodeReport], silent: Mapping[str, str], bare: Iterable[str], plans: Iterable[FleetPlan]
) -> tuple[FleetNode, ...]:
    """`bare`: nodes of the cluster that have no allocator. Those that only a plan knows are lost."""
    nodes = {name: _node(name, report) for name, report in reports.items()}
    nodes |= {name: FleetNode(name=name, state="silent", detail=detail) for name, detail in silent.items()}
    detail = "`kvpage fleet up` starts an allocator on it"
    nodes |= {name: FleetNode(name=name, state="no-allocator", detail=detail) for name in bare}
    for name in {name for plan in plans for name in plan.unreachable} - nodes.keys():
        nodes[name] = FleetNode(name=name, state="lost", detail="it is not in the cluster")
    return tuple(nodes[name] for name in sorted(nodes))


def out_of_sight(
    last: Iterable[FleetPlan], now: Collection[FleetPlan], reachable: Collection[str]
) -> Iterator[FleetPlan]:
    """Plans that were seen before, and of which no node answers now: they are not gone."""
    seen = {plan.id for plan in now}
    for plan in last:
        nodes = tuple(dict.fromkeys(rank.node for rank in plan.ranks))
        if plan.id not in seen and not any(name in reachable for name in nodes):
            ranks = tuple(
                msgspec.structs.replace(rank, state="unreachable", num_holders=0, holders=()) for rank in plan.ranks
            )
            state: FleetPlanState = "degraded" if plan.state == "ready" else plan.state
            yield msgspec.structs.replace(plan, state=state, ranks=ranks, unreachable=nodes)


def _node(name: str, report: NodeReport) -> FleetNode:
    waiting = [f"device {device.device} is {device.state}" for device in report.devices if device.state != "ready"]
    detail = report.fault or "; ".join(waiting)
    return FleetNode(
        name=name,
        state="not-ready" if detail else "ready",
        run_dir=report.run_dir,
        devices=report.devices,
        detail=detail,
    )


def changes(before: Fleet, after: Fleet, time: str) -> list[FleetEvent]:
    """What is another in `after`: nodes first, then plans and their ranks."""
    found = []
    for kind, states in _STATES.items():
        old, new = dict(states(before)), dict(states(after))
        for subject in sorted(old.keys() | new.keys()):
            was, now = old.get(subject, ""), new.get(subject, "")
            if was != now:
                found.append(FleetEvent(time=time, kind=kind, subject=subject, before=was, after=now))
    return found


def _of_nodes(fleet: Fleet) -> Iterator[tuple[str, str]]:
    return ((node.name, node.state) for node in fleet.nodes)


def _of_plans(fleet: Fleet) -> Iterator[tuple[str, str]]:
    return ((f"{plan.name} ({plan.id})", plan.state) for plan in fleet.plans)


def _of_ranks(fleet: Fleet) -> Iterator[tuple[str, str]]:
    for plan in fleet.plans:
        for rank in plan.ranks:
            yield f"{plan.name} ({plan.id}) rank {rank.rank} on {rank.node}", rank.state


_STATES: dict[FleetEventKind, Callable[[Fleet], Iterator[tuple[str, str]]]] = {
    "node": _of_nodes,
    "plan": _of_plans,
    "rank": _of_ranks,
}
