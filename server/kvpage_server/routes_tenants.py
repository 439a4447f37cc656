"""`/v1/pools/{pool_id}/tenants`, `block-map`, `prefixes:clear`: who shares the blocks of a pool, on which terms."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from kvpage.client.block_resources import BlockMap, TenantList, TenantState
from kvpage.errors import NotFound, shorten
from kvpage.wire import leasing
from kvpage_server import lease_bodies, openapi_leases
from kvpage_server.audit import begin
from kvpage_server.bodies import read_body
from kvpage_server.json_answers import json_answer
from kvpage_server.queries import cells_of, known_query
from kvpage_server.services import services_of


def add_routes(app: FastAPI) -> None:
    tenant = "/v1/pools/{pool_id}/tenants/{name:path}"  # which may be empty, and have slashes
    app.add_api_route(
        "/v1/pools/{pool_id}/tenants", get_tenants, methods=["GET"], operation_id="list_tenants",
        summary="Who shares a pool", responses=openapi_leases.TENANT_LIST_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/pools/{pool_id}/block-map", get_block_map, methods=["GET"], operation_id="get_block_map",
        summary="All blocks of a pool, for a picture", openapi_extra=openapi_leases.MAP_PARAMETERS,
        responses=openapi_leases.MAP_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        tenant, get_tenant, methods=["GET"], operation_id="get_tenant", summary="One who shares a pool",
        responses=openapi_leases.TENANT_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        tenant, put_tenant, methods=["PUT"], operation_id="set_tenant", summary="Quota, priority and weight",
        openapi_extra=openapi_leases.TENANT_BODY, responses=openapi_leases.PUT_TENANT_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        "/v1/pools/{pool_id}/prefixes:clear", clear_prefixes, methods=["POST"], operation_id="clear_prefixes",
        summary="Forget every cached prefix", status_code=204, responses=openapi_leases.CLEAR_ANSWERS,
    )  # fmt: skip


async def get_tenants(request: Request, pool_id: str) -> Response:
    """Those with settings, and those that have leases."""
    known_query(request)
    return json_answer(TenantList(tenants=await _tenants(request, pool_id)))


async def get_block_map(request: Request, pool_id: str) -> Response:
    """In `?cells=` cells at most: so large pools are told of in a few kilobytes too."""
    max_cells = cells_of(known_query(request, "cells"))
    drawn = await services_of(request).pools.block_map(pool_id, max_cells)
    return json_answer(msgspec.convert(drawn, BlockMap, from_attributes=True))


async def get_tenant(request: Request, pool_id: str, name: str) -> Response:
    known_query(request)
    return json_answer(_named(await _tenants(request, pool_id), name))


async def put_tenant(request: Request, pool_id: str, name: str) -> Response:
    """Instead of the settings before. What it holds beyond a new quota stays until it is freed."""
    known_query(request)
    services = services_of(request)
    asked = await read_body(request, lease_bodies.TenantRequest)
    quota = "none" if asked.quota_bytes is None else asked.quota_bytes
    await begin(request, quota_bytes=quota, priority=asked.priority, weight=asked.weight)
    owner = await services.pools.owner(pool_id)
    tenant = leasing.TenantSettings(
        name=name, quota_bytes=asked.quota_bytes, priority=asked.priority, weight=asked.weight
    )
    await owner.link.ask(leasing.SetTenants(pool_id=pool_id, tenants=[tenant]), leasing.TenantsSet)
    return json_answer(_named(await _tenants(request, pool_id), name))


async def clear_prefixes(request: Request, pool_id: str) -> Response:
    """Nobody finds what was computed before, with other weights. Blocks stay with those who hold them."""
    known_query(request)
    owner = await services_of(request).pools.owner(pool_id)
    await owner.link.ask(leasing.ClearContents(pool_id=pool_id), leasing.ContentsCleared)
    return Response(status_code=204)


async def _tenants(request: Request, pool_id: str) -> list[TenantState]:
    blocks = await services_of(request).pools.leasable_blocks(pool_id)
    return [msgspec.convert(tenant, TenantState, from_attributes=True) for tenant in blocks.tenants]


def _named(tenants: Sequence[TenantState], name: str) -> TenantState:
    found = next((tenant for tenant in tenants if tenant.name == name), None)
    if found is None:
        raise NotFound(f"tenant {shorten(repr(name))} has no settings in this pool and no leases; PUT settings")
    return found
