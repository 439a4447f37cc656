"""What /openapi.json says. `python -m kvpage_server.openapi` prints it as docs/openapi.json has it.

The framework's own body parsing is not used (bodies are read by `kvpage.strict_json`), so it cannot derive what they
are: the schemas come from the types that read and write them, the problems from `kvpage.errors`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvpage.client import resources
from kvpage.errors import ERRORS_BY_CODE
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan
from kvpage_server.problems import PROBLEM_JSON, Problem
from kvpage_server.roles import ROLES_BY_LABEL, RULES

_TEMPLATE = "#/components/schemas/{}"
_TOKENS = (
    "Over TCP. Every token has a role, each of which may do what the ones before it may: "
    + ", ".join(f"`{label}`" for label in ROLES_BY_LABEL)
    + "; `x-role` says which an operation needs, and `x-open` whether it is served without a token too, under a name "
    "the server is bound to. The Unix socket needs none: the kernel says who asks."
)
_RESPONSES = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
    408: "RequestTimeout", 409: "Conflict", 410: "Gone",
    413: "TooLarge", 415: "UnsupportedMediaType", 422: "Unprocessable", 429: "TooManyRequests",
    500: "InternalError", 502: "BadGateway", 503: "Unavailable",
}  # fmt: skip
"""Names of the problems' answers."""
_ALWAYS = (400, 401, 403, 405, 408, 413, 500, 503)
_WORKER = (502, 503)
Answers = dict[int | str, dict[str, Any]]


def reference(schema: str) -> dict[str, Any]:
    return {"$ref": _TEMPLATE.format(schema)}


def body(schema: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference(schema)}}}}


def answer(schema: str, description: str, **more: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": reference(schema)}}, **more}


def problems(*statuses: int) -> Answers:
    """References to documented problems, those that can be the answer to anything among them."""
    return {
        status: {"$ref": f"#/components/responses/{_RESPONSES[status]}"} for status in sorted({*statuses, *_ALWAYS})
    }


def answers(schema: str, *problem_statuses: int) -> Answers:
    return {200: answer(schema, "OK"), **problems(*problem_statuses)}


def _plans(description: str) -> dict[str, Any]:
    """A plan, or with `ranks` in the request the plans of all."""
    schema = {"anyOf": [reference("Plan"), reference("RankedPlan")]}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def query(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


def links(parameter: str, pointer: str, *operations: str) -> dict[str, Any]:
    """Operations that take a value of the answer's body."""
    return {
        operation: {"operationId": operation, "parameters": {parameter: f"$response.body#{pointer}"}}
        for operation in operations
    }


def headers(*, required: bool = True, **descriptions: str) -> dict[str, Any]:
    return {
        name.replace("_", "-"): {"description": text, "schema": {"type": "string"}, "required": required}
        for name, text in descriptions.items()
    }


_WAIT = {"type": "number", "minimum": 0}
_PREFER = {
    "name": "Prefer", "in": "header", "required": False, "schema": {"type": "string"},
    "description": "`wait=N`: wait up to N seconds (at most 30) for the memory to be committed",
}  # fmt: skip
PLAN_REQUEST_BODY = body("PlanRequest")
POOL_REQUEST_BODY = {**body("PoolRequest"), "parameters": [_PREFER]}
DETAIL_PARAMETER = {
    "parameters": [query("detail", "`groups` leaves the layers out", {"type": "string", "enum": ["full", "groups"]})]
}
POOL_FILTERS = {
    "parameters": [
        query("name", "only pools of this name", {"type": "string"}),
        query("device", "only pools on this device", {"type": "string"}),
    ]
}
WAIT_PARAMETER = {
    "parameters": [query("wait", "seconds to wait, at most 30, while the pool is creating or deleting", _WAIT)]
}
DELETE_PARAMETERS = {
    "parameters": [
        query("wait", "seconds that holders may take to let go, at most 30", _WAIT),
        query("force", "forget a pool that is still held then", {"type": "string", "enum": ["true", "false"]}),
    ]
}
VERBOSE_PARAMETER = {"parameters": [query("verbose", "name every check", {"type": "string"})]}

_PLAN_HEADERS = headers(ETag="Of these bytes; the plan never changes")
_NEW_PLAN = {
    "headers": headers(
        required=False,  # the plans of several ranks have neither as a whole
        ETag="Of these bytes; the plan never changes",
        Location="Where the plan is",
    ),
    "links": links("plan_id", "/plan_id", "get_plan", "get_layout_svg"),
}
_POOL = {
    "headers": headers(Location="Where the pool is"),
    "links": links("pool_id", "/id", "get_pool", "delete_pool", "get_pool_tensors"),
}
PLAN_ANSWERS: Answers = {
    200: {
        "description": "The plan, or with `detail=groups` the plan without its layers",
        "content": {"application/json": {"schema": {"anyOf": [reference("Plan"), reference("PlanGroups")]}}},
        "headers": _PLAN_HEADERS,
    },
    304: {"description": "The caller has the plan already (If-None-Match)"},
    **problems(404, 422, 429),
}
PICTURE_ANSWERS: Answers = {
    200: {
        "description": "Pages, padding, slabs and strides to scale; light or dark as the reader prefers",
        "content": {"image/svg+xml": {"schema": {"type": "string"}}},
        "headers": headers(ETag="Of these bytes; the picture changes with the version of kvpage only"),
    },
    304: {"description": "The caller has the picture already (If-None-Match)"},
    **problems(404, 422, 429),
}
POST_PLAN_ANSWERS: Answers = {
    200: _plans("This server had the plan already, or those of all ranks") | _NEW_PLAN,
    201: _plans("A plan this server did not have, or one of several ranks") | _NEW_PLAN,
    **problems(400, 409, 413, 415, 422, 429),
}
POOL_LIST_ANSWERS = answers("PoolList", 422, *_WORKER)
POOL_ANSWERS = answers("Pool", 404, 422, *_WORKER)
POST_POOL_ANSWERS: Answers = {
    200: answer("Pool", "A pool of this name and plan was there already", **_POOL),
    201: answer("Pool", "The pool is ready", **_POOL),
    202: answer("Pool", "The memory is being committed; Location has the pool", **_POOL),
    **problems(400, 409, 410, 413, 415, 422, 429, *_WORKER),
}
DELETE_POOL_ANSWERS: Answers = {
    200: answer("ForgottenPool", "The pool is gone, its memory is in use until its holders have let go"),
    204: {"description": "The memory is given back"},
    **problems(404, 409, 422, *_WORKER),
}
_HANDLE_EVENT = 'event: handle\ndata: {"kind": "cuda_ipc", "offset_bytes": 0, "size_bytes": 67108864, …}\n\n'
HOLD_ANSWERS: Answers = {
    200: {
        "description": "First an event `handle`, whose data is JSON: pool_id, plan_id, epoch, device_uuid, kind, "
        "handle (64 bytes, base64), offset_bytes, size_bytes. Then comments, until either side ends the stream; the "
        "last event is `lost`, with code and detail, when the memory is lost",
        "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _HANDLE_EVENT}},
    },
    **problems(404, 409, 410, 422, *_WORKER),
}
TENSOR_ANSWERS = answers("PoolTensors", 404, 422, 429, *_WORKER)
DEVICE_ANSWERS = answers("DeviceList", 422, 502)
LIVE_ANSWERS = answers("Health")
READY_ANSWERS: Answers = {
    200: answer("Health", "Ready"),
    **problems(),
    503: answer("Health", "Not ready"),
}
METRICS_ANSWERS: Answers = {
    200: {"description": "Prometheus' text format; docs/metrics.md", "content": {"text/plain": {}}},
    **problems(422),
}
ERRORS_ANSWERS: Answers = {200: {"description": "A page for people", "content": {"text/html": {}}}, **problems()}


def install(app: FastAPI) -> None:
    """Let `/openapi.json` be made when it is first asked for: its schemas cost memory that most servers never need."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # the way FastAPI documents for it


def as_json(document: dict[str, Any]) -> str:
    """The text of docs/openapi.json."""
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _document(app: FastAPI) -> dict[str, Any]:
    from kvpage_server.openapi_examples import add_examples  # plans, which takes a moment

    document = get_openapi(title="kvpage", version=app.version, description=app.description, routes=app.routes)
    document["security"] = [{}, {"token": []}]
    document["components"] = {
        "schemas": _schemas(),
        "responses": {name: _problem_answer(status) for status, name in _RESPONSES.items()},
        "securitySchemes": {
            "token": {"type": "http", "scheme": "bearer", "description": _TOKENS},
        },
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            _say_who_may(operation)
            for answer in operation["responses"].values():
                if "$ref" in answer:
                    del answer["description"]  # the framework's, where the reference has its own
    add_examples(document)
    return document


def _say_who_may(operation: dict[str, Any]) -> None:
    rule = RULES[operation["operationId"]]
    operation["x-role"] = rule.role.label
    operation["x-open"] = rule.is_open


def _problem_answer(status: int) -> dict[str, Any]:
    codes = sorted(code for code, kind in ERRORS_BY_CODE.items() if kind.http_status == status)
    listed = ", ".join(f"`{code}`" for code in codes)
    return {"description": f"Problem {listed}", "content": {PROBLEM_JSON: {"schema": reference("Problem")}}}


def _schemas() -> dict[str, Any]:
    from kvpage.request import PlanRequest
    from kvpage.request_model import describe as describe_model
    from kvpage_server.openapi_fleet import FLEET_KINDS
    from kvpage_server.openapi_leases import KINDS
    from kvpage_server.routes_fleet import FleetPlanRequest
    from kvpage_server.routes_pools import PoolRequest  # these import this module

    plan_request = PlanRequest.model_json_schema(ref_template=_TEMPLATE.format("{model}"))
    describe_model(plan_request)
    schemas: dict[str, Any] = plan_request.pop("$defs", {})
    schemas["PlanRequest"] = plan_request
    kinds = [Plan, RankedPlan, Problem, PoolRequest, resources.Pool, resources.PoolList, resources.PoolTensors]
    kinds += [resources.ForgottenPool, resources.DeviceList, resources.Health, *KINDS, *FLEET_KINDS, FleetPlanRequest]
    _, components = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE.format("{name}"))
    schemas.update(components)
    for name in ("PoolRequest", "FleetPlanRequest"):
        schemas[name]["properties"]["request"] = reference("PlanRequest")
    schemas["PlanGroups"] = _without(schemas["Plan"], "layers")
    return schemas


def _without(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema of an object that lacks the property `name`."""
    properties = {key: value for key, value in schema["properties"].items() if key != name}
    required = [key for key in schema["required"] if key != name]
    return {**schema, "title": "PlanGroups", "properties": properties, "required": required}


def main() -> None:
    from kvpage.run_directory import RunDirectory
    from kvpage_server.app import create_app
    from kvpage_server.settings import Settings

    nowhere = Settings(run_directory=RunDirectory(Path("/nonexistent")))  # nothing is started
    sys.stdout.write(as_json(create_app(nowhere).openapi()))


if __name__ == "__main__":
    main()
