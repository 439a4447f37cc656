"""What a client asks about a fleet, and how it reads the answers, as `kvpage.client.calls` does about the rest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvpage.client.arguments import checked_seconds, checked_text
from kvpage.client.calls import Call, Request, decode, encode, get, request_json, segment
from kvpage.client.fleet_resources import Fleet, FleetPlan, Place


def fleet() -> Call[Fleet]:
    return (yield from get(Request(method="GET", path="/v1/fleet"), Fleet))


def create_fleet_plan(request: object, *, name: str, places: Sequence[Place] | None, wait_s: float) -> Call[FleetPlan]:
    body = {"name": checked_text("name", name), "request": msgspec.Raw(request_json(request))}
    if places is not None:
        body["places"] = list(places)
    asked = Request(method="POST", path="/v1/fleet/plans", body=encode(body), wait_s=checked_seconds("wait_s", wait_s))
    return (yield from get(asked, FleetPlan))


def get_fleet_plan(plan_id: str) -> Call[FleetPlan]:
    return (yield from get(Request(method="GET", path=_path(plan_id)), FleetPlan))


def delete_fleet_plan(plan_id: str, *, force: bool) -> Call[FleetPlan | None]:
    query = {"force": "true"} if force else None
    answer = yield Request(method="DELETE", path=_path(plan_id), query=query, wait_s=60.0)
    content = answer.checked()
    return decode(content, FleetPlan) if content else None


def _path(plan_id: str) -> str:
    return f"/v1/fleet/plans/{segment('plan_id', plan_id)}"
