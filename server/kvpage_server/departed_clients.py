"""What the event loop says of connections whose client has gone is no error of the server's.

Ending a connection takes several steps, and the client may end it between any two. The loop tells the protocol
(`connection_lost`), and beside that calls some of these errors fatal, with a traceback in the log for each.
"""

from __future__ import annotations

import asyncio
from typing import Any


def ignore_departed_clients() -> None:
    """From now on the running loop logs no such error."""
    asyncio.get_running_loop().set_exception_handler(_handle)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if "transport" in context and isinstance(context.get("exception"), OSError):
        return
    loop.default_exception_handler(context)
