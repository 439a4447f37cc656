"""What the HTTP API says about the blocks of a pool: the server encodes these, the clients decode them.

As in `resources`, fields a reader does not know are ignored. Groups are numbered as in the pool's plan.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvpage.wire import leasing


class GroupBlocks(leasing.GroupBlocks, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Of one group. used + cached + free = its blocks in the slabs that it owns."""


class TenantState(leasing.TenantState, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """One who shares the pool: settings and use."""


class LeaseState(leasing.LeaseState, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A lease, without what would let others use it."""


class PrefixState(leasing.PrefixState, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What the prefix cache has done since the worker opened the pool."""


class Latency(leasing.Latency, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """How long the worker took for steps: `counts[i]` took at most `bounds_s[i]`, the last entry longer than all."""


class PoolBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """How full a pool is, and who has its blocks."""

    num_slabs: int
    free_slabs: int
    idle_slabs: int
    """With cached blocks only: any group may have them."""
    slab_bytes: int
    groups: list[GroupBlocks]
    tenants: list[TenantState]
    num_leases: int
    leases_by_state: dict[str, int]
    leases: list[LeaseState]
    """The first `leasing.MAX_LEASES_NAMED`."""
    prefix: PrefixState | None
    """None where the plan allows no prefix cache."""
    steps: Latency


class BlockMap(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of a pool, drawn together to cells of `slabs_per_cell` slabs (the last may have fewer), from slab 0
    on, which is nobody's. By cell, used + cached + free = the blocks into which its owned slabs are cut.
    """

    num_slabs: int
    slabs_per_cell: int
    owners: list[int]
    """1 + the group that has slabs of the cell, 0: no group, -1: several."""
    owned: list[int]
    """Slabs of the cell that a group has."""
    used: list[int]
    """Blocks that are held."""
    shared: list[int]
    """Those of them that are held more than once."""
    cached: list[int]
    free: list[int]
    """Blocks of owned slabs that are neither."""
    most_held: list[int]
    """How often the block is held that is held most."""


class LeaseList(msgspec.Struct, frozen=True, kw_only=True):
    num_leases: int
    leases: list[LeaseState]
    """The first `leasing.MAX_LEASES_NAMED`."""


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    tenants: list[TenantState]


class OpenedLease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A lease, for its owner."""

    lease_id: str
    """Whoever knows it may use the lease. A secret."""
    pool_id: str
    generation: int
    """How often it has had an owner."""
    tenant: str
    salt: str
    """What the hashes of this tenant's prefixes begin with, in hex."""
    expires_in_s: float
    blocks: list[int]
    """By group: how many it holds."""
    clears_on_reuse: list[bool]
    """By group: whether its blocks are to be cleared each time, also when their holder uses them again."""
    token: str | None = None
    """What proves that one may adopt it. A secret. None for a lease that was adopted."""


class RenewedLease(msgspec.Struct, frozen=True, kw_only=True):
    expires_in_s: float


class HeldPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks of one group, ascending, without those that are reserved."""

    group: int
    ids: list[int]
    times: list[int]
    """How often the lease holds each."""
    next_page_token: str | None = None


class LeaseView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    state: LeaseState
    held: HeldPage | None = None
    """Of the group that was asked for."""


class GrantedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that the lease holds now, by group."""

    ids: dict[int, list[int]]
    clear: dict[int, list[int]]
    """Those of them whose bytes may be another's: write zeros before anything else."""


class PrefixBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """The longest cached beginning of a prompt."""

    num_tokens: int
    ids: list[list[int]]
    """By group: the blocks of it that are needed, the last one ending with it."""


class FoundBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """As `PrefixBlocks`, of one that was only looked for."""

    num_tokens: int
    ids: list[list[int]]
    num_revived: list[int]
    """By group: blocks of it that nobody holds now, so that there are as many fewer to be had once they are taken."""


class ReservedBlocks(msgspec.Struct, frozen=True, kw_only=True):
    reservation_id: str
    expires_in_s: float


class ContentsPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contents of one group: the hashes by which its cached blocks are found, in hex."""

    group: int
    hashes: list[str]
    number: int
    """Of the last event before the list was begun; events up to it may be in the list already."""
    cursor: str
    """Where to read events on from, as `Last-Event-ID`: the same on every page."""
    next_page_token: str | None = None


class ContentEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the events `stored` and `removed`."""

    pool_id: str
    number: int
    """Ascending by one in the log of its pool."""
    group: int
    hashes: list[str]


class PoolEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the event `pool`."""

    pool_id: str
    name: str
    device: str
    state: Literal["creating", "ready", "failed", "deleting", "deleted"]


class MissedEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the event `missed`: list the pool's contents anew, some events of it are gone."""

    pool_id: str
