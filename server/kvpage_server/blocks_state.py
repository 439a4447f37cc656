"""What a worker says of the blocks of a pool."""

from __future__ import annotations

import os
import time
from collections import Counter

from kvpage.pages.leases import Lease
from kvpage.wire import leasing
from kvpage_server.worker_blocks import LATENCY_BOUNDS_S, PoolBlocks


def describe_blocks(pool_id: str, blocks: PoolBlocks, now_s: float) -> leasing.BlocksState:
    pool = blocks.pool
    slabs = pool.blocks.slab_counts()
    leases = list(pool.book)
    return leasing.BlocksState(
        pool_id=pool_id,
        num_slabs=pool.geometry.num_slabs,
        free_slabs=slabs.free,
        idle_slabs=slabs.idle,
        slab_bytes=pool.plan.slab_bytes,
        groups=_groups(blocks, leases),
        tenants=_tenants(blocks, leases),
        num_leases=len(leases),
        num_opened=blocks.num_opened,
        leases_by_state=dict(Counter(map(_state, leases))),
        leases=[lease_state(blocks, lease, now_s) for lease in leases[: leasing.MAX_LEASES_NAMED]],
        prefix=_prefix(blocks),
        steps=leasing.Latency(bounds_s=list(LATENCY_BOUNDS_S), counts=list(blocks.step_counts), sum_s=blocks.steps_s),
    )


def map_blocks(pool_id: str, blocks: PoolBlocks, max_cells: int) -> leasing.BlockMap:
    drawn = blocks.pool.blocks.map(max_cells)
    return leasing.BlockMap(
        pool_id=pool_id,
        num_slabs=blocks.pool.geometry.num_slabs,
        slabs_per_cell=drawn.slabs_per_cell,
        owners=drawn.owners.tolist(),
        owned=drawn.owned.tolist(),
        used=drawn.used.tolist(),
        shared=drawn.shared.tolist(),
        cached=drawn.cached.tolist(),
        free=drawn.free.tolist(),
        most_held=drawn.most_held.tolist(),
    )


def _groups(blocks: PoolBlocks, leases: list[Lease]) -> list[leasing.GroupBlocks]:
    described = []
    for group, block_bytes in enumerate(blocks.pool.block_bytes):
        counts = blocks.pool.blocks.counts(group)
        held = Counter[bool]()
        for lease in leases:
            held[lease.state == "active"] += lease.blocks[group] + _reserved(lease, group)
        described.append(
            leasing.GroupBlocks(
                used=counts.used,
                cached=counts.cached,
                free=counts.free,
                slabs=counts.slabs,
                available=blocks.pool.blocks.available(group),
                leased=held[True],
                quarantined=held[False],
                block_bytes=block_bytes,
                padding_bytes=blocks.padding_bytes[group],
                num_allocated=blocks.num_allocated[group],
            )
        )
    return described


def _reserved(lease: Lease, group: int) -> int:
    return sum(reservation.blocks[group] for reservation in lease.reservations.values())


def _tenants(blocks: PoolBlocks, leases: list[Lease]) -> list[leasing.TenantState]:
    num_leases = Counter(lease.tenant for lease in leases)
    described = []
    for tenant in blocks.pool.book.tenants():
        waits = blocks.room.counts.get(tenant.name)
        described.append(
            leasing.TenantState(
                name=tenant.name,
                quota_bytes=tenant.quota_bytes,
                priority=tenant.priority,
                weight=tenant.weight,
                used_bytes=blocks.pool.usage.used_bytes(tenant.name),
                num_leases=num_leases[tenant.name],
                num_waiting=blocks.room.num_waiting(tenant.name),
                num_waited=waits.waited if waits else 0,
                num_served=waits.served if waits else 0,
                num_given_up=waits.given_up if waits else 0,
                waited_s=waits.waited_s if waits else 0.0,
            )
        )
    return described


def lease_state(blocks: PoolBlocks, lease: Lease, now_s: float) -> leasing.LeaseState:
    record, expires_s = lease.record, blocks.pool.book.expires_s(lease)
    return leasing.LeaseState(
        name=record.name,
        tenant=record.tenant,
        state=_state(lease),
        generation=record.generation,
        pid=record.pid,
        client_name=record.client_name,
        ttl_s=record.ttl_s,
        expires_in_s=None if expires_s is None else max(0.0, expires_s - now_s),
        blocks=list(lease.blocks),
        reserved=[_reserved(lease, group) for group in range(len(lease.blocks))],
        owner_age_s=age_s(record.born),
    )


def age_s(born: int) -> float | None:
    """Of a process that began so many clock ticks after boot; 0: not known."""
    if not born:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born / os.sysconf("SC_CLK_TCK"))


def _state(lease: Lease) -> leasing.LeaseStateName:
    assert lease.state != "ended"  # it is not in the book any more
    return lease.state


def _prefix(blocks: PoolBlocks) -> leasing.PrefixState | None:
    counts = blocks.pool.prefix.counts
    return None if counts is None else leasing.PrefixState(**counts._asdict())
