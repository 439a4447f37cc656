"""`GET /v1/pools/{pool_id}/hold`: a stream whose first event is a pool's handle, and whose life is the hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from kvpage.errors import KvpageError
from kvpage.memory.cuda_descriptor import holder_ended
from kvpage_server import openapi
from kvpage_server.hold_watch import HoldWatch
from kvpage_server.queries import known_query
from kvpage_server.remote_hold import RemoteHold
from kvpage_server.services import services_of

COMMENT_S = 15.0
"""How often an idle stream says something, so that a client whose machine or network is gone is noticed."""


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/v1/pools/{pool_id}/hold", hold_pool, methods=["GET"], operation_id="hold_pool",
        summary="Hold a pool and get its handle", responses=openapi.HOLD_ANSWERS, response_class=StreamingResponse,
    )  # fmt: skip


async def hold_pool(request: Request, pool_id: str) -> StreamingResponse:
    """Keep the stream open as long as the memory is mapped: its end is the end of the hold."""
    known_query(request)
    pools = services_of(request).pools
    hold = await pools.hold(pool_id)
    try:
        watch = HoldWatch(_connection_fd(request), hold.lifeline_fd)
    except KvpageError:
        hold.close()
        raise
    # Never kept by anybody between: the handle is a secret.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(hold, watch, pools.stopping), headers=headers, media_type="text/event-stream")


def _connection_fd(request: Request) -> int | None:
    """Of the client's connection, which stays the protocol's."""
    connection = request.scope.get("state", {}).get("connection")
    return None if connection is None or connection.fileno() < 0 else int(connection.fileno())


async def _events(hold: RemoteHold, watch: HoldWatch, stopping: asyncio.Event) -> AsyncIterator[str]:
    ends: set[asyncio.Future[Any]] = set()
    with contextlib.closing(hold), watch:
        try:
            yield f"event: handle\ndata: {json.dumps(hold.event)}\n\n"
            ends |= {asyncio.ensure_future(watch.ended()), asyncio.ensure_future(stopping.wait())}
            while not (await asyncio.wait(ends, timeout=COMMENT_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                yield ": held\n\n"
            if watch.memory_is_lost:
                error = holder_ended()
                yield f"event: lost\ndata: {json.dumps({'code': error.code, 'detail': error.message})}\n\n"
        finally:
            for end in ends:
                end.cancel()
