"""Messages about all blocks of a pool: how they are, whose turn it is, which contents came and went."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvpage.wire.lease_values import Count, Group, Hashes, LeaseStateName, TenantName
from kvpage.wire.values import Body, Id, Name, PoolId, SizeBytes, Value, WaitS

MAX_CELLS = 4096

# --- requests --------------------------------------------------------------------------------------------------------


class DescribeBlocks(Body, frozen=True, kw_only=True):
    pool_id: PoolId


class MapBlocks(Body, frozen=True, kw_only=True):
    """All blocks of a pool at once, for a picture."""

    pool_id: PoolId
    max_cells: Annotated[int, Meta(ge=1, le=MAX_CELLS)] = 1024


class TenantSettings(Value, frozen=True, kw_only=True):
    name: TenantName
    quota_bytes: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1


class SetTenants(Body, frozen=True, kw_only=True):
    """Role `api`: settings instead of those of the same names."""

    pool_id: PoolId
    tenants: list[TenantSettings]


class ReadEvents(Body, frozen=True, kw_only=True):
    """Contents that came and went, after a cursor, oldest first."""

    pool_id: PoolId
    log_id: Annotated[str, Meta(max_length=32)] = ""
    """Empty: from now on."""
    after: Id = 0
    at_most: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    wait_s: WaitS = 0.0
    """How long to wait for the first one."""


class ListContents(Body, frozen=True, kw_only=True):
    """All contents of one group, for a reader who has missed events."""

    pool_id: PoolId
    group: Group
    after_block: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Of blocks above this one only."""


class ClearContents(Body, frozen=True, kw_only=True):
    """Role `api`: forget every cached prefix, because the weights have changed."""

    pool_id: PoolId


# --- replies ---------------------------------------------------------------------------------------------------------


class GroupBlocks(Value, frozen=True, kw_only=True):
    """Of one group. used + cached + free = its blocks in the slabs that it owns."""

    used: Count
    """Held by leases."""
    cached: Count
    free: Count
    slabs: Count
    available: Count
    """What could be allocated now, if this group alone asked: free, in free slabs, and by evicting."""
    leased: Count
    """Held by leases whose owners are there, each block once for each lease; reserved ones too."""
    quarantined: Count
    """Held by leases whose owners have gone."""
    block_bytes: SizeBytes
    padding_bytes: Id = 0
    """Of a block, what no layer's data fills."""
    num_allocated: Id = 0
    """Blocks that were handed out since the worker opened the pool."""


class TenantState(Value, frozen=True, kw_only=True):
    name: TenantName
    quota_bytes: int | None
    priority: int
    weight: int
    used_bytes: Id
    num_leases: Count
    num_waiting: Count
    num_waited: Id
    """Requests that had to wait, since the worker opened the pool; and what became of them."""
    num_served: Id
    num_given_up: Id
    waited_s: float


class LeaseState(Value, frozen=True, kw_only=True):
    name: Name
    tenant: TenantName
    state: LeaseStateName
    generation: Id
    pid: int
    client_name: str
    ttl_s: float
    expires_in_s: float | None
    blocks: list[Count]
    reserved: list[Count]
    owner_age_s: float | None = None
    """How long its process has lived; None where that is not known."""


class PrefixState(Value, frozen=True, kw_only=True):
    hits: Id
    misses: Id
    asked_tokens: Id
    found_tokens: Id
    stored: Id
    duplicates: Id
    evicted: Id
    blocks: Id


class Latency(Value, frozen=True, kw_only=True):
    """How long the worker took for steps: `counts[i]` took at most `bounds_s[i]`, the last entry longer than all."""

    bounds_s: list[float]
    counts: list[Id]
    sum_s: float


class BlocksState(Body, frozen=True, kw_only=True):
    pool_id: PoolId
    num_slabs: Count
    free_slabs: Count
    idle_slabs: Count
    """With cached blocks only: any group may have them."""
    slab_bytes: SizeBytes
    groups: list[GroupBlocks]
    tenants: list[TenantState]
    num_leases: Count
    leases_by_state: dict[LeaseStateName, Count]
    """How many there are of each; those of which there are none may be left out."""
    num_opened: Id = 0
    """Leases that were opened since the worker opened the pool, adopted ones not counted again."""
    leases: list[LeaseState]
    """The first `MAX_LEASES_NAMED`."""
    prefix: PrefixState | None
    """None where the plan allows no prefix cache."""
    steps: Latency


class BlockMap(Body, frozen=True, kw_only=True):
    """By cell, of `slabs_per_cell` slabs each (the last may have fewer), from slab 0 on."""

    pool_id: PoolId
    num_slabs: Count
    slabs_per_cell: Count
    owners: list[int]
    """1 + the group that has slabs of the cell, 0: no group, -1: several."""
    owned: list[Count]
    """Slabs of the cell that a group has."""
    used: list[Count]
    """Blocks that are held."""
    shared: list[Count]
    """Those of them that are held more than once."""
    cached: list[Count]
    free: list[Count]
    """Blocks of owned slabs that are neither."""
    most_held: list[Count]
    """How often the block is held that is held most."""


class TenantsSet(Body, frozen=True, kw_only=True):
    tenants: list[TenantSettings]


class ContentEvent(Value, frozen=True, kw_only=True):
    number: Id
    kind: Literal["stored", "removed"]
    group: Group
    hashes: Hashes


class EventList(Body, frozen=True, kw_only=True):
    log_id: Annotated[str, Meta(max_length=32)]
    after: Id
    """Read on from here."""
    has_missed: bool
    """Events after the cursor are gone: list all contents, and go on from there."""
    events: list[ContentEvent]


class ContentList(Body, frozen=True, kw_only=True):
    log_id: Annotated[str, Meta(max_length=32)]
    after: Id
    """Where in the events this was."""
    hashes: Hashes
    last_block: Count
    is_last: bool
    """False: ask again, after `last_block`. Read events on from where the first part was."""


class ContentsCleared(Body, frozen=True, kw_only=True):
    pool_id: PoolId
