"""`/v1/fleet`: plans for ranks on several machines, where this server is the head of a fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from kvpage.client.fleet_resources import Place
from kvpage_server import openapi_fleet
from kvpage_server.access import require_role
from kvpage_server.audit import begin, record
from kvpage_server.bodies import read_body
from kvpage_server.json_answers import json_answer
from kvpage_server.queries import is_true, known_query
from kvpage_server.roles import FORCED_DELETE
from kvpage_server.services import services_of


class FleetPlanRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/fleet/plans`."""

    name: str
    request: dict[str, Any]
    """A plan request; ranks without `memory_bytes` have what is left of their device."""
    places: list[Place] | None = None
    """Of each rank, in order; left out, chosen by memory."""


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/fleet", get_fleet, methods=["GET"], operation_id="get_fleet", summary="Nodes and plans of the fleet",
        responses=openapi_fleet.FLEET_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/fleet/plans", post_plan, methods=["POST"], operation_id="create_fleet_plan",
        summary="Plan all ranks and reserve them on all nodes", openapi_extra=openapi_fleet.PLAN_BODY,
        responses=openapi_fleet.POST_PLAN_ANSWERS,
    )  # fmt: skip
    path = "/v1/fleet/plans/{fleet_plan_id}"
    app.add_api_route(
        path, get_plan, methods=["GET"], operation_id="get_fleet_plan", summary="One plan of the fleet",
        responses=openapi_fleet.PLAN_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        path, delete_plan, methods=["DELETE"], operation_id="delete_fleet_plan", summary="Give a plan back everywhere",
        status_code=204, openapi_extra=openapi_fleet.DELETE_PARAMETERS, responses=openapi_fleet.DELETE_PLAN_ANSWERS,
    )  # fmt: skip


async def get_fleet(request: Request) -> Response:
    known_query(request)
    return json_answer(await services_of(request).fleet.run(lambda fleet: fleet.status()))


async def post_plan(request: Request) -> Response:
    """200 when the plan is committed on all nodes, or was there already. Goes on when the client leaves."""
    known_query(request)
    asked = await read_body(request, FleetPlanRequest)
    await begin(request, name=asked.name)
    making = services_of(request).fleet.run(lambda fleet: fleet.plan(asked.request, asked.name, asked.places))
    plan = await asyncio.shield(making)
    record(request, fleet_plan_id=plan.id)
    return json_answer(plan, headers={"Location": f"/v1/fleet/plans/{plan.id}"})


async def get_plan(request: Request, fleet_plan_id: str) -> Response:
    """By id or name."""
    known_query(request)
    return json_answer(await services_of(request).fleet.run(lambda fleet: fleet.plan_status(fleet_plan_id)))


async def delete_plan(request: Request, fleet_plan_id: str) -> Response:
    """204 when all of it is gone, 202 with what is left while a node is away. `?force=true`: also what is held."""
    is_forced = is_true(known_query(request, "force"), "force")
    if is_forced:
        require_role(request.scope, FORCED_DELETE)
        record(request, force=True)
    await begin(request)
    releasing = services_of(request).fleet.run(lambda fleet: fleet.release(fleet_plan_id, force=is_forced))
    left = await asyncio.shield(releasing)
    return Response(status_code=204) if left is None else json_answer(left, 202)
