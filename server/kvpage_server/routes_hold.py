"""`GET /v1/pools/{pool_id}/hold`: a stream whose first event is a pool's handle, and whose life is the hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from kvpage_server import openapi
from kvpage_server.queries import known_query
from kvpage_server.remote_hold import RemoteHold
from kvpage_server.services import services_of

COMMENT_S = 15.0
"""How often an idle stream says something, so that a client that is gone without a word is noticed."""


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
    # Never kept by anybody between: the handle is a secret.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(hold, pools.stopping), headers=headers, media_type="text/event-stream")


async def _events(hold: RemoteHold, stopping: asyncio.Event) -> AsyncIterator[str]:
    try:
        yield f"event: handle\ndata: {json.dumps(hold.event)}\n\n"
        while not stopping.is_set():
            try:
                await asyncio.wait_for(stopping.wait(), COMMENT_S)
            except TimeoutError:
                yield ": held\n\n"
    finally:
        hold.close()
