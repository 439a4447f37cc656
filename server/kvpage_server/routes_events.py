"""`/v1/events` and `/v1/pools/{pool_id}/contents`: what routers follow to know where prefixes are cached."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from kvpage.client.block_resources import ContentsPage
from kvpage.errors import StaleHandle
from kvpage.wire import leasing
from kvpage_server import openapi_leases
from kvpage_server.event_cursors import ContentsPlace, Cursor, as_page_token, as_word, contents_place, cursors_of
from kvpage_server.json_answers import json_answer
from kvpage_server.lease_bodies import unpacked_hashes
from kvpage_server.queries import group_of, known_query
from kvpage_server.services import services_of


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/events", get_events, methods=["GET"], operation_id="read_events",
        summary="Contents and pools, as they come and go",
        openapi_extra=openapi_leases.EVENT_PARAMETERS, responses=openapi_leases.EVENT_ANSWERS,
        response_class=StreamingResponse,
    )  # fmt: skip
    app.add_api_route(
        "/v1/pools/{pool_id}/contents", get_contents, methods=["GET"], operation_id="list_contents",
        summary="What the cached blocks of a group hold", openapi_extra=openapi_leases.CONTENTS_PARAMETERS,
        responses=openapi_leases.CONTENTS_ANSWERS,
    )  # fmt: skip


async def get_events(request: Request) -> StreamingResponse:
    """A stream of events, of one pool or all. With `Last-Event-ID` it goes on after that event."""
    query = known_query(request, "pool_id")
    services = services_of(request)
    pool_id = query.get("pool_id")
    if pool_id is not None:
        await services.pools.owner(pool_id)
    word = request.headers.get("last-event-id", "")
    cursors = cursors_of(word) if word else {}
    services.events.check_room()
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(services.events.read(pool_id, cursors), headers=headers, media_type="text/event-stream")


async def get_contents(request: Request, pool_id: str) -> Response:
    """All contents of one group, in pages, and where to read events on from."""
    query = known_query(request, "group", "page_token")
    group, token = group_of(query), query.get("page_token")
    owner = await services_of(request).pools.owner(pool_id)
    place = None if token is None else contents_place(token)
    after_block = 0 if place is None else place.last_block
    body = leasing.ListContents(pool_id=pool_id, group=group, after_block=after_block)
    part = await owner.link.ask(body, leasing.ContentList)
    if place is not None and place.log_id != part.log_id:
        raise StaleHandle("the worker was replaced while its contents were listed; begin again, without page_token")
    begun = Cursor(part.log_id, part.after) if place is None else Cursor(place.log_id, place.number)
    last_block = part.last_block
    next_place = None if part.is_last else ContentsPlace(begun.log_id, begun.number, last_block)
    page = ContentsPage(
        group=group,
        hashes=unpacked_hashes(part.hashes),
        number=begun.number,
        cursor=as_word({pool_id: begun}),
        next_page_token=None if next_place is None else as_page_token(next_place),
    )
    return await asyncio.to_thread(json_answer, page)  # of some 10 MB
