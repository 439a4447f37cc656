"""The API describes itself: every operation, its examples, its problems; and the committed copy is the current one."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import jsonschema_rs
import pytest

import kvpage
from kvpage.errors import ERRORS_BY_CODE
from kvpage.request import PlanRequest
from kvpage_server import openapi_examples
from kvpage_server.openapi import as_json
from support.checkout import ROOT

COMMITTED = ROOT / "docs" / "openapi.json"
DOCUMENT: dict[str, Any] = json.loads(COMMITTED.read_text())
OPERATIONS = {
    "/v1/plans": {"post"},
    "/v1/plans/{plan_id}": {"get"},
    "/v1/plans/{plan_id}/layout.svg": {"get"},
    "/v1/pools": {"get", "post"},
    "/v1/pools/{pool_id}": {"get", "delete"},
    "/v1/pools/{pool_id}/tensors": {"get"},
    "/v1/pools/{pool_id}/hold": {"get"},
    "/v1/pools/{pool_id}/leases": {"get", "post"},
    "/v1/pools/{pool_id}/leases:adopt": {"post"},
    "/v1/pools/{pool_id}/leases/{lease_id}": {"get", "delete"},
    "/v1/pools/{pool_id}/leases/{lease_id}/renew": {"post"},
    "/v1/pools/{pool_id}/leases/{lease_id}/blocks:batch": {"post"},
    "/v1/pools/{pool_id}/leases/{lease_id}/prefix:take": {"post"},
    "/v1/pools/{pool_id}/leases/{lease_id}/prefix:find": {"post"},
    "/v1/pools/{pool_id}/leases/{lease_id}/reservations": {"post"},
    "/v1/pools/{pool_id}/leases/{lease_id}/reservations/{reservation_id}": {"delete"},
    "/v1/pools/{pool_id}/leases/{lease_id}/reservations/{reservation_id}:commit": {"post"},
    "/v1/pools/{pool_id}/tenants": {"get"},
    "/v1/pools/{pool_id}/block-map": {"get"},
    "/v1/pools/{pool_id}/tenants/{name}": {"get", "put"},
    "/v1/pools/{pool_id}/prefixes:clear": {"post"},
    "/v1/pools/{pool_id}/contents": {"get"},
    "/v1/events": {"get"},
    "/v1/fleet": {"get"},
    "/v1/fleet/plans": {"post"},
    "/v1/fleet/plans/{fleet_plan_id}": {"get", "delete"},
    "/v1/devices": {"get"},
    "/livez": {"get"},
    "/readyz": {"get"},
    "/health": {"get"},
    "/metrics": {"get"},
    "/errors": {"get"},
}
ANYWHERE = {"400", "401", "403", "405", "408", "413", "500", "503"}  # what the connection itself may end with
PROBLEMS = {
    "create_plan": "409 415 422 429",
    "get_plan": "404 422 429",
    "get_layout_svg": "404 422 429",
    "create_pool": "409 410 415 422 429 502",
    "list_pools": "422 502",
    "get_pool": "404 422 502",
    "delete_pool": "404 409 422 502",
    "get_pool_tensors": "404 422 429 502",
    "hold_pool": "404 409 410 422 502",
    "create_lease": "404 409 415 422 502",
    "adopt_lease": "404 409 410 415 422 502",
    "list_leases": "404 409 422 502",
    "get_lease": "404 410 422 502",
    "renew_lease": "404 410 422 502",
    "delete_lease": "404 410 422 502",
    "batch_blocks": "404 409 410 415 422 429 502",
    "take_prefix": "404 409 410 415 422 502",
    "find_prefix": "404 409 410 415 422 502",
    "create_reservation": "404 409 410 415 422 429 502",
    "commit_reservation": "404 409 410 415 422 502",
    "delete_reservation": "404 410 422 502",
    "list_tenants": "404 409 422 502",
    "get_block_map": "404 409 422 502",
    "get_tenant": "404 409 422 502",
    "set_tenant": "404 409 415 422 502",
    "clear_prefixes": "404 409 422 502",
    "list_contents": "404 409 410 422 502",
    "read_events": "404 422 429 502",
    "get_fleet": "409 422 502",
    "create_fleet_plan": "404 409 415 422 502",
    "get_fleet_plan": "404 409 422 502",
    "delete_fleet_plan": "404 409 422 502",
    "list_devices": "422 502",
    "livez": "",
    "readyz": "",
    "health": "",
    "metrics": "422",
    "errors": "",
}


def operations() -> list[dict[str, Any]]:
    return [operation for item in DOCUMENT["paths"].values() for operation in item.values()]


@pytest.mark.anyio
async def test_the_committed_copy_is_what_the_server_says(api: httpx.AsyncClient) -> None:
    current = as_json((await api.get("/openapi.json")).json())
    assert COMMITTED.read_text() == current, "run python -m kvpage_server.openapi > docs/openapi.json"


def test_every_operation_is_described_and_named() -> None:
    assert {path: set(methods) for path, methods in DOCUMENT["paths"].items()} == OPERATIONS
    assert len({operation["operationId"] for operation in operations()}) == len(operations())


def test_every_operation_declares_its_problems() -> None:
    declared = {
        operation["operationId"]: {status for status in operation["responses"] if status >= "400"}
        for operation in operations()
    }
    assert declared == {operation: ANYWHERE | set(more.split()) for operation, more in PROBLEMS.items()}


def test_every_reference_leads_somewhere_and_everything_is_referred_to() -> None:
    components = DOCUMENT["components"]
    there = {f"#/components/{kind}/{name}" for kind in ("schemas", "responses") for name in components[kind]}
    assert references(DOCUMENT) == there


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(inner) for inner in node.values()))
    if isinstance(node, list):
        return set().union(*(references(inner) for inner in node))
    return set()


def test_the_reference_search_sees_them_all() -> None:
    assert references({"a": [{"$ref": "x"}, {"b": {"$ref": "y"}}]}) == {"x", "y"}


def test_the_request_schema_is_that_of_the_validator() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(schemas["PlanRequest"]["properties"]) == {*PlanRequest.model_fields, "model"}  # becomes `layers`
    assert schemas["PoolRequest"]["properties"]["request"] == {"$ref": "#/components/schemas/PlanRequest"}


# --- examples ---------------------------------------------------------------------------------------------------------


def contents() -> dict[str, dict[str, Any]]:
    """Every body of JSON, by where it is."""
    found = {}
    for operation in operations():
        messages = {"request": operation.get("requestBody", {}), **operation["responses"]}
        for where, message in messages.items():
            for media_type, content in message.get("content", {}).items():
                if "json" in media_type:
                    found[f"{operation['operationId']} {where}"] = content
    return found


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    whole = {**schema, "components": DOCUMENT["components"]}
    return bool(jsonschema_rs.Draft202012Validator(whole).is_valid(value))


def test_every_body_has_an_example_that_its_schema_allows() -> None:
    assert len(contents()) >= 12
    for where, content in contents().items():
        assert is_valid(content["example"], content["schema"]), where


def test_every_code_is_shown_as_a_problem_of_its_status() -> None:
    shown = {}
    for answer in DOCUMENT["components"]["responses"].values():
        [content] = answer["content"].values()
        for code, example in answer["content"]["application/problem+json"]["examples"].items():
            assert is_valid(example["value"], content["schema"]), code
            assert example["value"]["status"] == ERRORS_BY_CODE[code].http_status
            shown[code] = answer
    assert shown.keys() == ERRORS_BY_CODE.keys()


def test_the_example_check_fires() -> None:
    schema = {"$ref": "#/components/schemas/PlanRequest"}
    assert is_valid(openapi_examples.PLAN_REQUEST, schema)
    assert not is_valid({**openapi_examples.PLAN_REQUEST, "unknown": 1}, schema)
    assert not is_valid({}, schema)


def test_the_example_of_a_plan_is_the_plan_of_the_example() -> None:
    plan = kvpage.plan(openapi_examples.PLAN_REQUEST)
    assert json.loads(plan.to_json()) == contents()["create_plan 201"]["example"]
    tensors = contents()["get_pool_tensors 200"]["example"]["tensors"]
    assert max(math.prod(tensor["shape"]) for tensor in tensors) * 2 <= plan.buffer_size_bytes
