"""What an application does whose client has left in this very turn of the loop.

uvloop lets nothing be written any more a turn before it tells (`connection_lost`), and does not say that it is closing:
what is written then raises RuntimeError, which would be logged as a failure of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive, Send


def ending(receive: Receive, is_lost: Callable[[], bool]) -> Receive:
    """`receive`, which says so where the client has left. It writes too: that a body may come (`Expect`)."""

    async def receive_or_end() -> Message:
        try:
            return await receive()
        except RuntimeError:
            await asyncio.sleep(0)
            if not is_lost():
                raise
            return {"type": "http.disconnect"}

    return receive_or_end


def dropping(send: Send, is_lost: Callable[[], bool]) -> Send:
    """`send`, which does nothing where the client has left."""

    async def send_or_drop(message: Message) -> None:
        try:
            await send(message)
        except RuntimeError:
            await asyncio.sleep(0)
            if not is_lost():
                raise

    return send_or_drop
