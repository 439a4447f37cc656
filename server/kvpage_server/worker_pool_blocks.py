"""Which pools have blocks that can be leased, and their state, opened when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpage.errors import NotSupported, SpecInvalid
from kvpage_server.block_plan import read_block_plan
from kvpage_server.control_block import map_block_state
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_pool_entry import Pool
from kvpage_server.worker_pools import PoolTable

if TYPE_CHECKING:  # NumPy: not for workers without leases
    from kvpage_server.worker_blocks import PoolBlocks


class LeasablePools:
    def __init__(self, pools: PoolTable, loop: Loop) -> None:
        self._pools, self._loop = pools, loop
        self._blocks: dict[str, PoolBlocks] = {}
        """By pool id, of pools of which a block was ever leased."""

    def of(self, pool: Pool) -> PoolBlocks:
        """Raises `Conflict` for a pool that is not ready or whose state is not sound, `NotSupported` for one whose
        blocks cannot be leased."""
        memory = pool.require_ready()
        found = self._blocks.get(pool.pool_id)
        if found is not None:
            return found
        known = read_block_plan(pool.plan, pool.size_bytes)
        state = map_block_state(memory.control)
        if known.plan is None or state is None:
            why_not = known.why_not or "it keeps no state"
            raise NotSupported(f"no blocks of pool {pool.pool_id} can be leased: {why_not}")
        from kvpage_server.worker_blocks import PoolBlocks

        blocks = self._blocks[pool.pool_id] = PoolBlocks(known.plan, state, self._loop.clock)
        return blocks

    def by_id(self, pool_id: str) -> PoolBlocks:
        """Raises `PoolNotFound`, and as `of`."""
        return self.of(self._pools.get(pool_id))

    def chosen(self, pool_id: str | None, name: str | None) -> Pool:
        """Raises `SpecInvalid` unless exactly one is given, `PoolNotFound`."""
        if (pool_id is None) == (name is None):
            raise SpecInvalid("a lease takes either a pool_id or a pool_name")
        return self._pools.find(name) if name is not None else self._pools.get(str(pool_id))

    def close(self, pool: Pool) -> None:
        """Let go of the pool's state, if it is open."""
        blocks = self._blocks.pop(pool.pool_id, None)
        if blocks is not None:
            blocks.close()


def was_ever_leased(pool: Pool) -> bool:
    """Whether a block of the pool, which is ready, was, by whichever worker."""
    state = map_block_state(pool.require_ready().control)
    if state is None:
        return False
    with state:
        return any(state[:8])
