"""Probes say what is wrong by name; the API describes itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from kvpage.request import PlanRequest

pytestmark = pytest.mark.anyio

OPERATIONS = {
    "/v1/plans": {"post"},
    "/v1/plans/{plan_id}": {"get"},
    "/v1/pools": {"get", "post"},
    "/v1/pools/{pool_id}": {"get", "delete"},
    "/v1/pools/{pool_id}/tensors": {"get"},
    "/v1/devices": {"get"},
    "/livez": {"get"},
    "/readyz": {"get"},
    "/health": {"get"},
    "/errors": {"get"},
}


async def test_the_process_is_alive_without_a_worker(api: httpx.AsyncClient) -> None:
    response = await api.get("/livez")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/readyz", "/health"])
async def test_it_is_not_ready_without_a_worker_and_says_which(api: httpx.AsyncClient, path: str) -> None:
    brief = await api.get(path)
    assert (brief.status_code, brief.json()) == (503, {"status": "not-ready"})
    verbose = await api.get(path, params={"verbose": ""})
    checks = {check["name"]: check for check in verbose.json()["checks"]}
    assert {name: check["ok"] for name, check in checks.items()} == {
        "serving": True,
        "worker:host": False,
        "pools:host": True,
    }
    assert checks["worker:host"]["detail"]


async def test_a_device_without_a_worker_is_listed(api: httpx.AsyncClient) -> None:
    [device] = (await api.get("/v1/devices")).json()["devices"]
    assert device["device"] == "host"
    assert device["state"] in ("starting", "lost")
    assert device["worker_pid"] is None


async def test_every_operation_is_described_and_named(api: httpx.AsyncClient) -> None:
    document = (await api.get("/openapi.json")).json()
    assert {path: set(operations) for path, operations in document["paths"].items()} == OPERATIONS
    operations = [operation for item in document["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)


async def test_every_reference_leads_somewhere(api: httpx.AsyncClient) -> None:
    document = (await api.get("/openapi.json")).json()
    used = references(document)
    assert used
    assert used <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(inner) for inner in node.values()))
    if isinstance(node, list):
        return set().union(*(references(inner) for inner in node))
    return set()


def test_the_reference_search_sees_them_all() -> None:
    assert references({"a": [{"$ref": "x"}, {"b": {"$ref": "y"}}]}) == {"x", "y"}


async def test_the_request_schema_is_that_of_the_validator(api: httpx.AsyncClient) -> None:
    schemas = (await api.get("/openapi.json")).json()["components"]["schemas"]
    assert schemas["PlanRequest"]["properties"].keys() == PlanRequest.model_fields.keys()
    assert schemas["PoolRequest"]["properties"]["request"] == {"$ref": "#/components/schemas/PlanRequest"}
    assert json.dumps(schemas)


@pytest.mark.parametrize(
    ("path", "statuses"), [("/v1/plans", "400 413 415 422 429"), ("/v1/pools", "400 409 413 415 422 503")]
)
async def test_problems_of_posts_are_declared(api: httpx.AsyncClient, path: str, statuses: str) -> None:
    answers = (await api.get("/openapi.json")).json()["paths"][path]["post"]["responses"]
    assert answers.keys() >= set(statuses.split())
    for status in statuses.split():
        assert "application/problem+json" in answers[status]["content"]
