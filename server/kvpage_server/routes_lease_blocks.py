"""What is done with a lease: batches, prefixes and reservations. Each of these requests renews it."""

from __future__ import annotations

import re

from fastapi import FastAPI, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from kvpage.client.block_resources import FoundBlocks, GrantedBlocks, PrefixBlocks, ReservedBlocks
from kvpage.errors import NotFound
from kvpage.wire import leasing
from kvpage_server import lease_bodies, openapi_leases
from kvpage_server.bodies import read_body
from kvpage_server.http_leases import FoundLease
from kvpage_server.json_answers import json_answer
from kvpage_server.lease_bodies import packed_hashes, unpacked
from kvpage_server.lease_keys import key_of
from kvpage_server.queries import known_query
from kvpage_server.services import services_of

_RESERVATION_ID = re.compile(r"reservation-[0-9a-f]{16}")


class _Noun(StringConvertor):
    """A segment of a path without a verb behind it, which would be another resource."""

    regex = "[^/:]+"


def add_routes(app: FastAPI) -> None:
    register_url_convertor("noun", _Noun())
    lease = "/v1/pools/{pool_id}/leases/{lease_id}"
    app.add_api_route(
        f"{lease}/blocks:batch", post_batch, methods=["POST"], operation_id="batch_blocks",
        summary="Commit, retain, free and allocate", openapi_extra=openapi_leases.BATCH_BODY,
        responses=openapi_leases.BATCH_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        f"{lease}/prefix:take", take_prefix, methods=["POST"], operation_id="take_prefix",
        summary="Hold the longest cached beginning", openapi_extra=openapi_leases.TAKE_BODY,
        responses=openapi_leases.TAKE_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        f"{lease}/prefix:find", find_prefix, methods=["POST"], operation_id="find_prefix",
        summary="Look for the longest cached beginning", openapi_extra=openapi_leases.FIND_BODY,
        responses=openapi_leases.FIND_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        f"{lease}/reservations", post_reservation, methods=["POST"], operation_id="create_reservation",
        summary="Set blocks aside", status_code=201, openapi_extra=openapi_leases.RESERVATION_BODY,
        responses=openapi_leases.RESERVE_ANSWERS,
    )  # fmt: skip
    reservation = f"{lease}/reservations/{{reservation_id:noun}}"
    app.add_api_route(
        f"{reservation}:commit", commit_reservation, methods=["POST"], operation_id="commit_reservation",
        summary="Use blocks that were set aside", openapi_extra=openapi_leases.COMMIT_BODY,
        responses=openapi_leases.COMMIT_ANSWERS,
    )  # fmt: skip
    app.add_api_route(
        reservation, delete_reservation, methods=["DELETE"], operation_id="delete_reservation",
        summary="Give blocks back that were set aside", status_code=204,
        responses=openapi_leases.DELETE_RESERVATION_ANSWERS,
    )  # fmt: skip


async def post_batch(request: Request, pool_id: str, lease_id: str) -> Response:
    """All of it or nothing, in this order; only what is committed stays so where the rest is refused."""
    known_query(request)
    services = services_of(request)
    batch = await read_body(request, lease_bodies.LeaseBatch)
    lease = await services.leases.find(pool_id, lease_id)
    key = key_of(request.headers.get("idempotency-key"))

    def ask(wait_s: float) -> leasing.TakeStep:
        return lease_bodies.step(lease_id, key, batch, wait_s)

    async def work() -> leasing.Granted:
        return await services.leases.ask_patiently(request, lease, ask, leasing.Granted, batch.wait_s)

    return json_answer(_granted(await services.leases.once(lease, key, await _made_of(request), work)))


async def take_prefix(request: Request, pool_id: str, lease_id: str) -> Response:
    known_query(request)
    services = services_of(request)
    asked = await read_body(request, lease_bodies.PrefixRequest)
    lease = await services.leases.find(pool_id, lease_id)
    key = key_of(request.headers.get("idempotency-key"))
    body = leasing.TakePrefix(
        lease_id=lease_id, key=key, hashes=list(map(packed_hashes, asked.hashes)), at_most_tokens=asked.at_most_tokens
    )

    async def work() -> leasing.PrefixTaken:
        return await lease.ask(body, leasing.PrefixTaken)

    taken = await services.leases.once(lease, key, await _made_of(request), work)
    return json_answer(PrefixBlocks(num_tokens=taken.num_tokens, ids=list(map(unpacked, taken.ids))))


async def find_prefix(request: Request, pool_id: str, lease_id: str) -> Response:
    """Holds nothing."""
    known_query(request)
    services = services_of(request)
    asked = await read_body(request, lease_bodies.PrefixRequest)
    lease = await services.leases.find(pool_id, lease_id)
    body = leasing.FindPrefix(
        lease_id=lease_id, hashes=list(map(packed_hashes, asked.hashes)), at_most_tokens=asked.at_most_tokens
    )
    found = await lease.ask(body, leasing.PrefixFound)
    ids = list(map(unpacked, found.ids))
    return json_answer(FoundBlocks(num_tokens=found.num_tokens, ids=ids, num_revived=found.num_revived))


async def post_reservation(request: Request, pool_id: str, lease_id: str) -> Response:
    """They are given back after `ttl_s`, and with the lease."""
    known_query(request)
    services = services_of(request)
    asked = await read_body(request, lease_bodies.ReservationRequest)
    lease = await services.leases.find(pool_id, lease_id)

    def ask(wait_s: float) -> leasing.Reserve:
        return leasing.Reserve(lease_id=lease_id, blocks=asked.blocks, wait_s=wait_s, ttl_s=asked.ttl_s)

    reserved = await services.leases.ask_patiently(request, lease, ask, leasing.Reserved, asked.wait_s)
    return json_answer(ReservedBlocks(reservation_id=reserved.reservation_id, expires_in_s=asked.ttl_s), 201)


async def commit_reservation(request: Request, pool_id: str, lease_id: str, reservation_id: str) -> Response:
    """So many of its blocks (`null`: all) are the lease's from now on; the rest stays set aside."""
    known_query(request)
    services = services_of(request)
    asked = await read_body(request, lease_bodies.ReservationCommit)
    lease = await services.leases.find(pool_id, lease_id)
    key = key_of(request.headers.get("idempotency-key"))
    body = leasing.CommitReservation(
        lease_id=lease_id, key=key, reservation_id=_checked(reservation_id), blocks=asked.blocks
    )

    async def work() -> leasing.Granted:
        return await lease.ask(body, leasing.Granted)

    return json_answer(_granted(await services.leases.once(lease, key, await _made_of(request), work)))


async def delete_reservation(request: Request, pool_id: str, lease_id: str, reservation_id: str) -> Response:
    known_query(request)
    lease: FoundLease = await services_of(request).leases.find(pool_id, lease_id)
    body = leasing.EndReservation(lease_id=lease_id, reservation_id=_checked(reservation_id))
    await lease.ask(body, leasing.ReservationEnded)
    return Response(status_code=204)


def _checked(reservation_id: str) -> str:
    if not _RESERVATION_ID.fullmatch(reservation_id):
        raise NotFound("the lease has no such reservation: it was committed, given back, or ran out")
    return reservation_id


async def _made_of(request: Request) -> bytes:
    """All that a repeated request must be the same in."""
    return request.url.path.encode() + b"\0" + await request.body()


def _granted(granted: leasing.Granted) -> GrantedBlocks:
    return GrantedBlocks(
        ids={group: unpacked(ids) for group, ids in granted.ids.items()},
        clear={group: unpacked(ids) for group, ids in granted.clear.items()},
    )
