"""What /openapi.json says about bodies. The schemas come from the types that read and write them.

The framework's own body parsing is not used (bodies are read by `kvpage.strict_json`), so it cannot derive them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvpage.client import resources
from kvpage.plans import Plan
from kvpage_server.problems import PROBLEM_JSON, Problem

_TEMPLATE = "#/components/schemas/{}"
Answers = dict[int | str, dict[str, Any]]


def _reference(schema: str) -> dict[str, Any]:
    return {"$ref": _TEMPLATE.format(schema)}


def _body(schema: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(schema)}}}}


def _answer(schema: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _reference(schema)}}}


def problems(*statuses: int) -> Answers:
    """Documented problems; 401 and 403 can be the answer to anything."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {PROBLEM_JSON: {"schema": _reference("Problem")}},
        }
        for status in sorted({*statuses, 401, 403})
    }


def answers(schema: str, *problem_statuses: int) -> Answers:
    return {200: _answer(schema, "OK"), **problems(*problem_statuses)}


def _query(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


PLAN_REQUEST_BODY = _body("PlanRequest")
POOL_REQUEST_BODY = {
    **_body("PoolRequest"),
    "parameters": [
        {
            "name": "Prefer", "in": "header", "required": False, "schema": {"type": "string"},
            "description": "`wait=N`: wait up to N seconds (at most 30) for the memory to be committed",
        }
    ],
}  # fmt: skip
POOL_FILTERS = {
    "parameters": [
        _query("name", "only pools of this name", {"type": "string"}),
        _query("device", "only pools on this device", {"type": "string"}),
    ]
}
WAIT_PARAMETER = {
    "parameters": [_query("wait", "seconds to wait while the pool is creating or deleting", {"type": "number"})]
}
VERBOSE_PARAMETER = {"parameters": [_query("verbose", "name every check", {"type": "string"})]}

PLAN_ANSWERS: Answers = {
    **answers("Plan", 404, 422),
    304: {"description": "The caller has the plan already (If-None-Match)"},
}
POST_PLAN_ANSWERS: Answers = {
    200: _answer("Plan", "This server had the plan already"),
    201: _answer("Plan", "A plan this server did not have"),
    **problems(400, 409, 413, 415, 422, 429),
}
POST_POOL_ANSWERS: Answers = {
    200: _answer("Pool", "A pool of this name and plan was there already"),
    201: _answer("Pool", "The pool is ready"),
    202: _answer("Pool", "The memory is being committed; Location has the pool"),
    **problems(400, 409, 413, 415, 422, 429, 503),
}
READY_ANSWERS: Answers = {200: _answer("Health", "Ready"), 503: _answer("Health", "Not ready")}


def install(app: FastAPI) -> None:
    """Let `/openapi.json` be made when it is first asked for: its schemas cost memory that most servers never need."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(
                title="kvpage", version=app.version, description=app.description, routes=app.routes
            )
            app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(_schemas())
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way FastAPI documents for it


def _schemas() -> dict[str, Any]:
    from kvpage.request import PlanRequest
    from kvpage_server.routes_pools import PoolRequest  # it imports this module for its routes

    plan_request = PlanRequest.model_json_schema(ref_template=_TEMPLATE.format("{model}"))
    schemas: dict[str, Any] = plan_request.pop("$defs", {})
    schemas["PlanRequest"] = plan_request
    kinds = [Plan, Problem, PoolRequest, resources.Pool, resources.PoolList, resources.PoolTensors]
    kinds += [resources.DeviceList, resources.Health]
    _, components = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE.format("{name}"))
    schemas.update(components)
    schemas["PoolRequest"]["properties"]["request"] = _reference("PlanRequest")
    return schemas
