"""What must hold of a pool and its leases at any time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvpage.pages.leased_state import LeasedState


def leases_fault(pool: LeasedState) -> str | None:
    """What does not hold, in words. Looks at every block."""
    return next(_faults(pool), None)


def _faults(pool: LeasedState) -> Iterator[str]:
    fault = pool.holdings.check() or pool.book.fault()
    if fault:
        yield fault
    unknown = pool.holdings.holders() - {lease.row for lease in pool.book.with_reservations()}
    if unknown:
        yield f"holders {sorted(unknown)[:8]} have blocks and are no leases"
    yield from _block_faults(pool)
    yield from _usage_faults(pool)


def _block_faults(pool: LeasedState) -> Iterator[str]:
    held, owners = pool.holdings.times_held(), pool.holdings.owners()
    for group in range(len(pool.block_bytes)):
        slabs = pool.blocks.slabs(group).slabs
        cut = pool.geometry.blocks_per_slab[group]
        ids = (slabs[:, None] * cut + np.arange(cut)).ravel()
        slots = pool.geometry.slots_of(group, ids.astype(np.intp))
        said, is_held = pool.blocks.times_held(group, ids), held[slots]
        if not np.array_equal(said, is_held):
            wrong = int(ids[said != is_held][0])
            yield f"block {wrong} of group {group} is held otherwise than its leases say"
        if not np.isin(owners[slabs], (0, 1 + group)).all():
            yield f"blocks are held as another group's in slabs of group {group}"
        held[slots] = 0
    if held.any():
        yield "somebody holds blocks of slabs that nobody owns"


def _usage_faults(pool: LeasedState) -> Iterator[str]:
    used: dict[str, int] = {}
    for lease in pool.book.with_reservations():
        blocks = pool.held(lease)
        counted = [len(blocks[group].ids) if group in blocks else 0 for group in range(len(pool.block_bytes))]
        if counted != lease.blocks:
            yield f"{lease} holds {counted} blocks"
        mine_bytes = sum(count * size for count, size in zip(lease.blocks, pool.block_bytes, strict=True))
        used[lease.tenant] = used.get(lease.tenant, 0) + mine_bytes
    for tenant in {*used, *(one.name for one in pool.book.tenants())}:
        if used.get(tenant, 0) != pool.usage.used_bytes(tenant):
            yield f"tenant {tenant!r} has {used.get(tenant, 0)} bytes, counted were {pool.usage.used_bytes(tenant)}"
