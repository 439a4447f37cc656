"""`/v1/plans`: pure planning, open to every caller."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from kvpage.errors import PlanNotFound
from kvpage_server.bodies import accepts_gzip, json_body
from kvpage_server.openapi import DETAIL_PARAMETER, PICTURE_ANSWERS, PLAN_ANSWERS, PLAN_REQUEST_BODY, POST_PLAN_ANSWERS
from kvpage_server.plan_cache import Encoding, Form, Representation
from kvpage_server.plan_queue import asker_of
from kvpage_server.plan_response import PlanResponse
from kvpage_server.planning import PlannedRanks
from kvpage_server.queries import known_query, query_form
from kvpage_server.services import services_of


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/plans", post_plan, methods=["POST"], operation_id="create_plan", summary="Plan a page layout",
        status_code=201, openapi_extra=PLAN_REQUEST_BODY, responses=POST_PLAN_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/plans/{plan_id}", get_plan, methods=["GET"], operation_id="get_plan", summary="A plan by its id",
        openapi_extra=DETAIL_PARAMETER, responses=PLAN_ANSWERS,
    )  # fmt: skip
    path = "/v1/plans/{plan_id}/layout.svg"
    app.add_api_route(
        path, get_picture, methods=["GET"], operation_id="get_layout_svg", summary="A picture of a plan",
        response_class=Response, responses=PICTURE_ANSWERS,
    )  # fmt: skip
    app.add_api_route(path, get_picture, methods=["HEAD"], include_in_schema=False)


async def post_plan(request: Request) -> Response:
    """201 for a plan this server did not have, 200 for one it had; so with the plans of several ranks."""
    services = services_of(request)
    known_query(request)
    body = await json_body(request)
    max_bytes = services.settings.intake.max_body_bytes
    asker = asker_of(request.scope)
    planned = await services.plans.plan_body(body, max_bytes=max_bytes, encoding=_encoding(request), asker=asker)
    if isinstance(planned, PlannedRanks):
        return _ranks_response(planned)
    answer = await services.plans.answer(_wanted(request, planned.plan_id, said=planned.said), asker)
    return PlanResponse(answer, 200 if planned.known else 201, is_location_new=True)


async def get_plan(request: Request, plan_id: str) -> Response:
    """`?detail=groups` leaves the layers out. `If-None-Match` with the plan's ETag gives 304."""
    return await _get(request, _wanted(request, plan_id, query_form(request)))


async def get_picture(request: Request, plan_id: str) -> Response:
    """An SVG document, the same to everybody who asks the same version of kvpage."""
    known_query(request)
    return await _get(request, _wanted(request, plan_id, "picture"))


async def _get(request: Request, wanted: Representation) -> Response:
    services, asker = services_of(request), asker_of(request.scope)
    try:
        answer = await services.plans.answer(wanted, asker)
    except PlanNotFound:
        in_use = await services.pools.plan(wanted.plan_id)  # which is never forgotten
        await services.plans.recall(wanted.plan_id, in_use, asker)
        answer = await services.plans.answer(wanted, asker)
    if _has_already(request, answer.representation):
        return PlanResponse(answer, 304)
    return PlanResponse(answer, 200)


def _wanted(request: Request, plan_id: str, form: Form = "full", said: str = "") -> Representation:
    return Representation(plan_id, form, _encoding(request), said)


def _encoding(request: Request) -> Encoding:
    return "gzip" if accepts_gzip(",".join(request.headers.getlist("accept-encoding"))) else "identity"


def _ranks_response(planned: PlannedRanks) -> Response:
    """Each plan is kept under its own id; the answer as a whole has none."""
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if planned.encoding != "identity":
        headers["Content-Encoding"] = planned.encoding
    return Response(planned.body, 200 if planned.known else 201, headers, "application/json")


def _has_already(request: Request, representation: Representation) -> bool:
    """RFC 9110: a weak comparison, `*` matches what exists."""
    for header in request.headers.getlist("if-none-match"):
        for tag in header.split(","):
            if tag.strip() == "*" or tag.strip().removeprefix("W/") == representation.etag:
                return True
    return False
