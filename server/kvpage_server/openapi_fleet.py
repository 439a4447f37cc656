"""What the description says about fleets."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpage.client import fleet_resources as fleet
from kvpage_server.openapi import Answers, answer, answers, body, headers, links, problems, query

_OF_FLEET = (409, 422, 502, 503)
PLAN_BODY = body("FleetPlanRequest")
FLEET_ANSWERS = answers("Fleet", *_OF_FLEET)
PLAN_ANSWERS = answers("FleetPlan", 404, *_OF_FLEET)
POST_PLAN_ANSWERS: Answers = {
    200: answer(
        "FleetPlan",
        "The plan is committed on all nodes; it may have been there already",
        headers=headers(Location="Where the plan is"),
        links=links("fleet_plan_id", "/id", "get_fleet_plan", "delete_fleet_plan"),
    ),
    **problems(400, 404, 413, 415, *_OF_FLEET),
}
DELETE_PARAMETERS = {
    "parameters": [
        query(
            "force", "also what is held, and without waiting for nodes that are away",
            {"type": "string", "enum": ["true", "false"]},
        )
    ]
}  # fmt: skip
DELETE_PLAN_ANSWERS: Answers = {
    202: answer("FleetPlan", "What is left: a node that is away still has a part of it"),
    204: {"description": "It is gone on all nodes"},
    **problems(404, *_OF_FLEET),
}
FLEET_KINDS = [fleet.Fleet, fleet.FleetPlan]
"""Of answers; the body's is beside its route."""

FLEET_PLAN_ID = "fleet-0123456789abcdef"


def examples(plan_request: dict[str, Any], plan_id: str) -> dict[str, Any]:
    """By schema."""
    rank = fleet.FleetRank(
        rank=0, node="node-a", device="host", state="ready", plan_id=plan_id, pool=f"fleet/mimo/0/{FLEET_PLAN_ID}",
        epoch="0123456789abcdef0123456789abcdef",
    )  # fmt: skip
    plan = fleet.FleetPlan(id=FLEET_PLAN_ID, name="mimo", state="ready", num_blocks=136, world_size=1, ranks=(rank,))
    device = fleet.FleetDevice(
        device="host", state="ready", available_bytes=994050048, limit_bytes=1 << 30, reserved_bytes=67108864
    )
    node = fleet.FleetNode(name="node-a", state="ready", run_dir="/run/kvpage", devices=(device,))
    event = fleet.FleetEvent(
        time="2026-01-01T00:00:00.000+00:00", kind="node", subject="node-a", before="lost", after="ready"
    )
    values = {"FleetPlan": plan, "Fleet": fleet.Fleet(nodes=(node,), plans=(plan,), events=(event,))}
    return {
        "FleetPlanRequest": {"name": "mimo", "request": plan_request},
        **{name: msgspec.to_builtins(value) for name, value in values.items()},
    }
