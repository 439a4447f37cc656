"""What was read from the workers, as metrics. Every sum over a label means something: states exclude each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from prometheus_client.core import Metric

from kvpage.client.resources import PoolStateName
from kvpage.wire.leasing import BlocksState, GroupBlocks, LeaseStateName, PrefixState, TenantState
from kvpage.wire.messages import PoolState
from kvpage_server.metrics_reading import DeviceReading
from kvpage_server.metrics_samples import MAX_POOLS_NAMED, MAX_TENANTS_NAMED, OTHER, Described, Named, Samples


def _table(
    kind: Literal["counter", "gauge", "histogram"], labels: str, meanings: dict[str, str]
) -> dict[str, Described]:
    return {name: Described(kind, meaning, tuple(labels.split())) for name, meaning in meanings.items()}


TABLE = {
    **_table("gauge", "device device_uuid", {
        "kvpage_device_ready": "1 when its worker answers and takes new pools",
        "kvpage_device_memory_limit_bytes": "What pools may take",
        "kvpage_device_reserved_bytes": "What pools have, pinned bytes included",
        "kvpage_device_pinned_bytes": "What forgotten pools have that are still held",
        "kvpage_device_free_bytes": "Free on the device, whoever uses the rest, when it was last seen",
        "kvpage_device_free_age_seconds": "How long ago the free bytes were seen",
    }),
    **_table("counter", "device device_uuid", {
        "kvpage_device_workers_total": "Workers that have served it since the API process started, the first included",
    }),
    **_table("gauge", "device pool", {
        "kvpage_pool_buffer_bytes": "Size of the buffer",
        "kvpage_pool_committed_bytes": "Of the buffer, what is there",
        "kvpage_pool_holders": "Attachments and leases",
        "kvpage_prefix_blocks": "Blocks that can be found by their content",
    }),
    **_table("gauge", "device pool state", {
        "kvpage_pool_state": "1 for the state that it is in, 0 for the others",
        "kvpage_slabs": "Slabs of the pool",
        "kvpage_slab_bytes": "The same in bytes",
        "kvpage_leases": "Leases",
    }),
    **_table("gauge", "device pool group state", {
        "kvpage_blocks": "Blocks of the slabs that the group owns",
        "kvpage_block_bytes": "The same in bytes",
        "kvpage_block_padding_bytes": "Of kvpage_block_bytes, what no layer's data fills",
        "kvpage_leased_blocks": "Blocks that leases hold, once for each lease, reserved ones too",
        "kvpage_leased_bytes": "The same in bytes",
    }),
    **_table("gauge", "device pool group", {
        "kvpage_group_slabs": "Slabs that the group owns",
        "kvpage_available_blocks": "What could be allocated now if this group alone asked",
        "kvpage_available_bytes": "The same in bytes",
        "kvpage_fragmentation_ratio": "Share of free blocks in the slabs that the group owns",
    }),
    **_table("counter", "device pool group", {
        "kvpage_allocated_blocks_total": "Blocks that leases were given, reserved ones too",
    }),
    **_table("counter", "device pool", {
        "kvpage_leases_opened_total": "Leases that were opened",
        "kvpage_prefix_hits_total": "Prompts of which a beginning was found",
        "kvpage_prefix_misses_total": "Prompts of which none was found",
        "kvpage_prefix_asked_tokens_total": "Tokens that were looked for",
        "kvpage_prefix_found_tokens_total": "Tokens of the beginnings that were found",
        "kvpage_prefix_stored_blocks_total": "Blocks whose content can be found since",
        "kvpage_prefix_duplicate_blocks_total": "Blocks whose content another had already",
        "kvpage_prefix_evicted_blocks_total": "Blocks whose content was given up",
    }),
    **_table("histogram", "device pool", {
        "kvpage_step_duration_seconds": "How long the worker took for a step of a lease, without waiting",
    }),
    **_table("gauge", "device pool tenant", {
        "kvpage_tenant_used_bytes": "Bytes of blocks that count for the tenant",
        "kvpage_tenant_quota_bytes": "What the tenant may have",
        "kvpage_tenant_leases": "Leases of the tenant",
        "kvpage_admission_waiting": "Requests that wait for room",
    }),
    **_table("counter", "device pool tenant outcome", {
        "kvpage_admission_waits_total": "Requests that have waited for room",
    }),
    **_table("counter", "device pool tenant", {
        "kvpage_admission_wait_seconds_total": "How long these waited",
    }),
}  # fmt: skip


class StateMetrics:
    """Lives as long as the server: it remembers which pools and tenants are named."""

    def __init__(self) -> None:
        self._pools, self._tenants = Named(MAX_POOLS_NAMED), Named(MAX_TENANTS_NAMED)

    def families(self, readings: Sequence[DeviceReading]) -> Iterator[Metric]:
        pools = [pool for reading in readings for pool in reading.pools]
        self._pools.keep((pool.state.device, pool.state.name) for pool in pools)
        self._tenants.keep((tenant.name,) for pool in pools if pool.blocks for tenant in pool.blocks.tenants)
        samples = Samples(TABLE)
        for reading in readings:
            _add_device(samples, reading)
        for pool in pools:
            labels = (pool.state.device, self._pools.label(pool.state.device, pool.state.name))
            _add_pool(samples, pool.state, labels)
            if pool.blocks is not None:
                _add_blocks(samples, pool.blocks, labels)
                for tenant in pool.blocks.tenants:
                    _add_tenant(samples, tenant, (*labels, self._tenants.label(tenant.name)))
        _add_fragmentation(samples)
        return samples.families()


def _add_device(samples: Samples, reading: DeviceReading) -> None:
    labels, device = (reading.name, reading.device_uuid), reading.device
    samples.add("kvpage_device_ready", float(reading.is_ready), *labels)
    samples.add("kvpage_device_workers_total", reading.num_workers, *labels)
    if device is not None:
        samples.add("kvpage_device_memory_limit_bytes", device.memory_limit_bytes, *labels)
        samples.add("kvpage_device_reserved_bytes", device.reserved_bytes, *labels)
        samples.add("kvpage_device_pinned_bytes", device.pinned_bytes, *labels)
        samples.add("kvpage_device_free_bytes", device.free_bytes, *labels)
        samples.add("kvpage_device_free_age_seconds", device.free_age_s, *labels)


def _add_pool(samples: Samples, pool: PoolState, labels: tuple[str, str]) -> None:
    samples.add("kvpage_pool_buffer_bytes", pool.buffer_size_bytes, *labels)
    samples.add("kvpage_pool_committed_bytes", pool.committed_bytes, *labels)
    samples.add("kvpage_pool_holders", pool.num_holders, *labels)
    for state in get_args(PoolStateName):
        samples.add("kvpage_pool_state", float(state == pool.state), *labels, state)


def _add_blocks(samples: Samples, blocks: BlocksState, labels: tuple[str, str]) -> None:
    for number, group in enumerate(blocks.groups):
        _add_group(samples, group, (*labels, str(number)))
    owned, free, idle = sum(group.slabs for group in blocks.groups), blocks.free_slabs, blocks.idle_slabs
    null = blocks.num_slabs - owned - free
    for state, count in (("used", owned - idle), ("idle", idle), ("free", free), ("null", null)):
        samples.add("kvpage_slabs", count, *labels, state)
        samples.add("kvpage_slab_bytes", count * blocks.slab_bytes, *labels, state)
    for name in get_args(LeaseStateName):
        samples.add("kvpage_leases", blocks.leases_by_state.get(name, 0), *labels, name)
    samples.add("kvpage_leases_opened_total", blocks.num_opened, *labels)
    samples.add_latency("kvpage_step_duration_seconds", blocks.steps, *labels)
    if blocks.prefix is not None:
        _add_prefix(samples, blocks.prefix, labels)


def _add_group(samples: Samples, group: GroupBlocks, labels: tuple[str, ...]) -> None:
    for state, count in (("used", group.used), ("cached", group.cached), ("free", group.free)):
        samples.add("kvpage_blocks", count, *labels, state)
        samples.add("kvpage_block_bytes", count * group.block_bytes, *labels, state)
        samples.add("kvpage_block_padding_bytes", count * group.padding_bytes, *labels, state)
    for state, count in (("active", group.leased), ("quarantined", group.quarantined)):
        samples.add("kvpage_leased_blocks", count, *labels, state)
        samples.add("kvpage_leased_bytes", count * group.block_bytes, *labels, state)
    samples.add("kvpage_allocated_blocks_total", group.num_allocated, *labels)
    samples.add("kvpage_group_slabs", group.slabs, *labels)
    samples.add("kvpage_available_blocks", group.available, *labels)
    samples.add("kvpage_available_bytes", group.available * group.block_bytes, *labels)


def _add_fragmentation(samples: Samples) -> None:
    """Free blocks lie in slabs that other blocks keep from other groups: a slab of free blocks only is free itself."""
    blocks = samples.values("kvpage_blocks")
    for *labels, state in blocks:
        if state == "free":
            used, cached, free = (blocks[*labels, name] for name in ("used", "cached", "free"))
            samples.add("kvpage_fragmentation_ratio", free / max(used + cached + free, 1), *labels)


def _add_prefix(samples: Samples, prefix: PrefixState, labels: tuple[str, str]) -> None:
    samples.add("kvpage_prefix_blocks", prefix.blocks, *labels)
    samples.add("kvpage_prefix_hits_total", prefix.hits, *labels)
    samples.add("kvpage_prefix_misses_total", prefix.misses, *labels)
    samples.add("kvpage_prefix_asked_tokens_total", prefix.asked_tokens, *labels)
    samples.add("kvpage_prefix_found_tokens_total", prefix.found_tokens, *labels)
    samples.add("kvpage_prefix_stored_blocks_total", prefix.stored, *labels)
    samples.add("kvpage_prefix_duplicate_blocks_total", prefix.duplicates, *labels)
    samples.add("kvpage_prefix_evicted_blocks_total", prefix.evicted, *labels)


def _add_tenant(samples: Samples, tenant: TenantState, labels: tuple[str, ...]) -> None:
    samples.add("kvpage_tenant_used_bytes", tenant.used_bytes, *labels)
    if labels[-1] != OTHER:  # where some of them have none, the sum would be the quota of nobody
        samples.add("kvpage_tenant_quota_bytes", tenant.quota_bytes, *labels)
    samples.add("kvpage_tenant_leases", tenant.num_leases, *labels)
    samples.add("kvpage_admission_waiting", tenant.num_waiting, *labels)
    failed = tenant.num_waited - tenant.num_waiting - tenant.num_served - tenant.num_given_up
    for outcome, count in (("served", tenant.num_served), ("given_up", tenant.num_given_up), ("failed", failed)):
        samples.add("kvpage_admission_waits_total", count, *labels, outcome)
    samples.add("kvpage_admission_wait_seconds_total", tenant.waited_s, *labels)
