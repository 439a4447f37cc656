"""Duplicates of every pool's descriptors, so that the memory outlives the worker that made it.

The API process never maps the memory; holding the descriptors is enough to keep it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from kvpage.memory.host import HostMemory
from kvpage.wire.channel import close_fds
from kvpage.wire.messages import AdoptPool, ChunkInfo, PoolState
from kvpage_server.control_block import adopt_control_block


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPool:
    """One pool as its worker last described it, and what it takes to hand it to another worker."""

    state: PoolState
    chunks: tuple[ChunkInfo, ...]
    fds: tuple[int, ...]
    """One for each chunk, then that of the control block; owned by the `HeldPools` it is in."""

    @property
    def adoption(self) -> AdoptPool:
        return AdoptPool(chunks=list(self.chunks))

    def plan(self) -> bytes:
        """The canonical plan, from the control block."""
        block, record = adopt_control_block(os.dup(self.fds[-1]), HostMemory())
        block.close()
        return record.plan


class HeldPools:
    """The pools of one device by their id. Owns the descriptors; `close()` gives them up."""

    def __init__(self) -> None:
        self._pools: dict[str, HeldPool] = {}

    def __repr__(self) -> str:
        num_fds = sum(len(pool.fds) for pool in self)
        return f"<HeldPools {len(self._pools)} pools, {num_fds} descriptors>"

    def __contains__(self, pool_id: str) -> bool:
        return pool_id in self._pools

    def __iter__(self) -> Iterator[HeldPool]:
        return iter(list(self._pools.values()))

    def get(self, pool_id: str) -> HeldPool | None:
        return self._pools.get(pool_id)

    def hold(self, pool: HeldPool) -> None:
        """Take over the descriptors of `pool` in place of those held for it before."""
        self.release(pool.state.pool_id)
        self._pools[pool.state.pool_id] = pool

    def release(self, pool_id: str) -> None:
        pool = self._pools.pop(pool_id, None)
        if pool is not None:
            close_fds(pool.fds)

    def close(self) -> None:
        for pool_id in list(self._pools):
            self.release(pool_id)
