"""What a server that ends says about the pools it served: which end with it, which stay, and who holds them."""

from __future__ import annotations

import asyncio
import logging

from kvpage.errors import KvpageError, printable
from kvpage.wire.messages import PoolState
from kvpage_server.settings import Settings
from kvpage_server.supervisor import Supervisor

logger = logging.getLogger("kvpage.api")

_ASK_S = 1.0  # a worker that does not answer is no reason to stay


async def say_farewell(pools: Supervisor, settings: Settings) -> None:
    """One line in the log for each pool."""
    fate = "stays with its worker" if settings.leave_workers or settings.external_workers else "ends with this server"
    try:
        async with asyncio.timeout(_ASK_S):
            states = await pools.pools()
    except (KvpageError, TimeoutError) as error:
        logger.warning("what pools there are is not known: %s", str(error) or "no answer from a worker")
        return
    for pool in states:
        logger.info("pool %s (%s, %d bytes) %s; %s", *_described(pool, fate))


def _described(pool: PoolState, fate: str) -> tuple[object, ...]:
    names = [f"pid {holder.pid} uid {holder.uid} ({printable(holder.client_name)})" for holder in pool.holders]
    more = [f"{pool.num_holders - len(names)} more"] if pool.num_holders > len(names) else []
    held = "held by " + ", ".join(names + more) if names else "held by nobody"
    return printable(pool.name), pool.pool_id, pool.buffer_size_bytes, fate, held
