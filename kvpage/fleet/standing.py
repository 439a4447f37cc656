"""What is so of a plan, judged from what its nodes say. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from kvpage.client.fleet_resources import FleetPlan, FleetPlanState, FleetRank
from kvpage.fleet.records import PHASES, FleetRecord, HeldPlan, HeldRank, NodeReport, Phase

Decision = Literal["reserving", "abandoned", "in-doubt", "committed", "released"]


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is, and what has to be done about it."""

    decision: Decision
    incomplete: tuple[str, ...]
    """Reachable nodes that do not have what the decision says: a mark, a pool, or nothing."""
    unreachable: tuple[str, ...]

    @property
    def is_settled(self) -> bool:
        return not self.incomplete and not self.unreachable


def judge(record: FleetRecord, reports: Mapping[str, NodeReport], *, ttl_s: float, given_up: bool = False) -> Judgement:
    """The mark that is furthest on decides: no node is committed before all are reserved, and none is released before
    somebody decided so. Without such a mark a plan is undone when nobody works on it any more (`given_up`, or older
    than `ttl_s`) and all its nodes answer; while one is away, that one may have been told that the plan is committed.
    """
    held = {name: held_plan(record.id, reports[name]) for name in record.nodes if name in reports}
    unreachable = tuple(name for name in record.nodes if name not in reports)
    furthest = max((PHASES.index(one.phase) for one in held.values() if one is not None), default=0)
    phase = PHASES[furthest]
    if phase != "reserved":
        incomplete = tuple(name for name, one in held.items() if not _has(one, phase))
        return Judgement(decision=phase, incomplete=incomplete, unreachable=unreachable)
    there = tuple(name for name, one in held.items() if one is not None)
    is_old = given_up or all(one.age_s > ttl_s for one in held.values() if one is not None)
    decision: Decision = "reserving" if not is_old else "in-doubt" if unreachable else "abandoned"
    return Judgement(decision=decision, incomplete=there, unreachable=unreachable)


def held_plan(plan_id: str, report: NodeReport) -> HeldPlan | None:
    return next((one for one in report.plans if one.id == plan_id), None)


def _has(held: HeldPlan | None, phase: Phase) -> bool:
    """Whether a node has what the plan's phase says."""
    if phase == "released":
        return held is None or (held.phase == phase and all(rank.state == "missing" for rank in held.ranks))
    return held is not None and held.phase == phase and all(rank.state == "ready" for rank in held.ranks)


def standing_of(record: FleetRecord, judgement: Judgement, reports: Mapping[str, NodeReport]) -> FleetPlan:
    ranks = tuple(_rank(record, rank, reports) for rank in range(record.world_size))
    return FleetPlan(
        id=record.id,
        name=record.name,
        state=_state(judgement, ranks),
        num_blocks=record.num_blocks,
        world_size=record.world_size,
        ranks=ranks,
        unreachable=judgement.unreachable,
    )


def _state(judgement: Judgement, ranks: Sequence[FleetRank]) -> FleetPlanState:
    match judgement.decision:
        case "committed":
            return "ready" if judgement.is_settled and all(rank.state == "ready" for rank in ranks) else "degraded"
        case "released":
            return "releasing"
        case decision:
            return decision


def _rank(record: FleetRecord, rank: int, reports: Mapping[str, NodeReport]) -> FleetRank:
    at = record.places[rank]
    held = _held_rank(record.id, rank, reports.get(at.node))
    return FleetRank(
        rank=rank,
        node=at.node,
        device=at.device,
        state=held.state if held is not None else "unreachable" if at.node not in reports else "missing",
        plan_id=record.plan_ids[rank],
        pool=record.pool_name(rank),
        epoch=held.epoch if held is not None else "",
        num_holders=held.num_holders if held is not None else 0,
        holders=held.holders if held is not None else (),
        detail=held.detail if held is not None else "",
    )


def _held_rank(plan_id: str, rank: int, report: NodeReport | None) -> HeldRank | None:
    plan = None if report is None else held_plan(plan_id, report)
    return None if plan is None else next((one for one in plan.ranks if one.rank == rank), None)


def ids_in(reports: Mapping[str, NodeReport]) -> Collection[str]:
    """Of all plans that some node has a record of, sorted."""
    return sorted({held.id for report in reports.values() for held in report.plans})
