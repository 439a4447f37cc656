"""`/v1/pools/{pool_id}/leases`: blocks of a pool for schedulers that have nothing but HTTP."""

from __future__ import annotations

import re

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from kvpage.client.block_resources import HeldPage, LeaseList, LeaseState, LeaseView, OpenedLease, RenewedLease
from kvpage.errors import SpecInvalid, shorten
from kvpage.wire import leasing
from kvpage_server import lease_bodies, openapi_leases
from kvpage_server.audit import begin, record
from kvpage_server.bodies import read_body
from kvpage_server.http_leases import FoundLease
from kvpage_server.json_answers import json_answer
from kvpage_server.queries import group_of, known_query
from kvpage_server.services import services_of

_AFTER = re.compile(r"[0-9]{1,10}")


def add_routes(app: FastAPI) -> None:
    leases, lease = "/v1/pools/{pool_id}/leases", "/v1/pools/{pool_id}/leases/{lease_id}"
    app.add_api_route(
        leases, post_lease, methods=["POST"], operation_id="create_lease", summary="Open a lease",
        status_code=201, openapi_extra=openapi_leases.LEASE_BODY, responses=openapi_leases.POST_LEASE_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        f"{leases}:adopt", adopt_lease, methods=["POST"], operation_id="adopt_lease", summary="Take a lease over",
        openapi_extra=openapi_leases.ADOPTION_BODY, responses=openapi_leases.ADOPT_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        leases, get_leases, methods=["GET"], operation_id="list_leases", summary="Leases of a pool",
        responses=openapi_leases.LEASE_LIST_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        lease, get_lease, methods=["GET"], operation_id="get_lease", summary="What a lease holds",
        openapi_extra=openapi_leases.HELD_PARAMETERS, responses=openapi_leases.LEASE_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        f"{lease}/renew", renew_lease, methods=["POST"], operation_id="renew_lease", summary="Keep a lease",
        responses=openapi_leases.RENEW_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        lease, delete_lease, methods=["DELETE"], operation_id="delete_lease", summary="Give back all of a lease",
        status_code=204, responses=openapi_leases.DELETE_ANSWERS,
    )  # fmt: skip


async def post_lease(request: Request, pool_id: str) -> Response:
    """A lease without blocks; it ends when it is not renewed for `ttl_s`."""
    known_query(request)
    services = services_of(request)
    asked = await read_body(request, lease_bodies.LeaseRequest)
    body = leasing.OpenLease(
        pool_id=pool_id, name=asked.name, tenant=asked.tenant, token=asked.token, ttl_s=asked.ttl_s
    )
    await begin(request, name=asked.name, tenant=asked.tenant)
    opened = await services.leases.begin(pool_id, body)
    record(request, lease_id=opened.lease_id)
    location = f"/v1/pools/{pool_id}/leases/{opened.lease_id}"
    return json_answer(_opened(opened, asked.ttl_s), 201, {"Location": location})


async def adopt_lease(request: Request, pool_id: str) -> Response:
    """The owner before can do nothing with it any more, whether it is there or not."""
    known_query(request)
    services = services_of(request)
    asked = await read_body(request, lease_bodies.LeaseAdoption)
    body = leasing.AdoptLease(
        pool_id=pool_id, name=asked.name, token=asked.token, generation=asked.generation, ttl_s=asked.ttl_s
    )
    await begin(request, name=asked.name)
    adopted = await services.leases.begin(pool_id, body)
    record(request, lease_id=adopted.lease_id)
    return json_answer(_opened(adopted, asked.ttl_s))


async def get_leases(request: Request, pool_id: str) -> Response:
    """Without ids and tokens: whoever knows an id may use the lease."""
    known_query(request)
    blocks = await services_of(request).pools.leasable_blocks(pool_id)
    leases = [msgspec.convert(lease, LeaseState, from_attributes=True) for lease in blocks.leases]
    return json_answer(LeaseList(num_leases=blocks.num_leases, leases=leases))


async def get_lease(request: Request, pool_id: str, lease_id: str) -> Response:
    """Does not renew it. `?group=` also lists the blocks it holds of one group."""
    query = known_query(request, "group", "page_token")
    lease = await services_of(request).leases.find(pool_id, lease_id)
    described = await lease.look(leasing.DescribeLease(lease_id=lease_id), leasing.LeaseDescribed)
    held = await _held(lease, query, len(described.lease.blocks)) if query else None
    state = msgspec.convert(described.lease, LeaseState, from_attributes=True)
    return json_answer(LeaseView(state=state, held=held))


async def renew_lease(request: Request, pool_id: str, lease_id: str) -> Response:
    known_query(request)
    lease = await services_of(request).leases.find(pool_id, lease_id)
    renewed = await lease.look(lease.renewal, leasing.LeaseRenewed)
    return json_answer(RenewedLease(expires_in_s=renewed.ttl_s))


async def delete_lease(request: Request, pool_id: str, lease_id: str) -> Response:
    """Everything it holds is given back."""
    known_query(request)
    leases = services_of(request).leases
    lease = await leases.find(pool_id, lease_id)
    await lease.look(leasing.CloseLease(lease_id=lease_id), leasing.LeaseClosed)
    leases.forget(lease_id)
    return Response(status_code=204)


async def _held(lease: FoundLease, query: dict[str, str], num_groups: int) -> HeldPage:
    group, after = group_of(query), query.get("page_token", "0")
    if group >= num_groups:
        raise SpecInvalid(f"there is no group {group}; the groups are 0 to {num_groups - 1}")
    if not _AFTER.fullmatch(after) or int(after) >= 2**32:
        raise SpecInvalid(f"page_token is {shorten(repr(after))}; it must be the next_page_token of a page before")
    body = leasing.ListHeld(lease_id=lease.lease_id, group=group, after=int(after))
    part = await lease.look(body, leasing.HeldList)
    ids = lease_bodies.unpacked(part.ids)
    return HeldPage(
        group=group,
        ids=ids,
        times=lease_bodies.unpacked(part.times),
        next_page_token=None if part.is_last else str(ids[-1]),
    )


def _opened(opened: leasing.LeaseOpened, ttl_s: float) -> OpenedLease:
    return OpenedLease(
        lease_id=opened.lease_id,
        pool_id=opened.pool_id,
        generation=opened.generation,
        tenant=opened.tenant,
        salt=opened.salt.hex(),
        expires_in_s=ttl_s,
        blocks=opened.blocks,
        clears_on_reuse=opened.clears_on_reuse,
        token=opened.token,
    )
