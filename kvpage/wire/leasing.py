"""Messages by which clients lease blocks of a pool. docs/protocol.md says what each does.

Block ids travel as `Ids`, hashes as `Hashes`; groups are numbered as in the pool's plan.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvpage.wire.lease_values import MAX_BLOCKS_GRANTED as MAX_BLOCKS_GRANTED
from kvpage.wire.lease_values import MAX_KEEP_S as MAX_KEEP_S
from kvpage.wire.lease_values import MAX_LEASES_NAMED as MAX_LEASES_NAMED
from kvpage.wire.lease_values import MAX_RESERVED_S as MAX_RESERVED_S
from kvpage.wire.lease_values import MAX_TTL_S as MAX_TTL_S
from kvpage.wire.lease_values import Count as Count
from kvpage.wire.lease_values import Counts as Counts
from kvpage.wire.lease_values import Group as Group
from kvpage.wire.lease_values import Hashes as Hashes
from kvpage.wire.lease_values import Ids as Ids
from kvpage.wire.lease_values import KeepS as KeepS
from kvpage.wire.lease_values import Key as Key
from kvpage.wire.lease_values import LeaseId as LeaseId
from kvpage.wire.lease_values import LeaseStateName as LeaseStateName
from kvpage.wire.lease_values import ReservationId as ReservationId
from kvpage.wire.lease_values import TenantName as TenantName
from kvpage.wire.lease_values import Token as Token
from kvpage.wire.lease_values import TtlS as TtlS
from kvpage.wire.pool_blocks import MAX_CELLS as MAX_CELLS
from kvpage.wire.pool_blocks import BlockMap as BlockMap
from kvpage.wire.pool_blocks import BlocksState as BlocksState
from kvpage.wire.pool_blocks import ClearContents as ClearContents
from kvpage.wire.pool_blocks import ContentEvent as ContentEvent
from kvpage.wire.pool_blocks import ContentList as ContentList
from kvpage.wire.pool_blocks import ContentsCleared as ContentsCleared
from kvpage.wire.pool_blocks import DescribeBlocks as DescribeBlocks
from kvpage.wire.pool_blocks import EventList as EventList
from kvpage.wire.pool_blocks import GroupBlocks as GroupBlocks
from kvpage.wire.pool_blocks import Latency as Latency
from kvpage.wire.pool_blocks import LeaseState as LeaseState
from kvpage.wire.pool_blocks import ListContents as ListContents
from kvpage.wire.pool_blocks import MapBlocks as MapBlocks
from kvpage.wire.pool_blocks import PrefixState as PrefixState
from kvpage.wire.pool_blocks import ReadEvents as ReadEvents
from kvpage.wire.pool_blocks import SetTenants as SetTenants
from kvpage.wire.pool_blocks import TenantSettings as TenantSettings
from kvpage.wire.pool_blocks import TenantsSet as TenantsSet
from kvpage.wire.pool_blocks import TenantState as TenantState
from kvpage.wire.values import Body, Id, Name, PoolId, Value, WaitS

# --- requests --------------------------------------------------------------------------------------------------------


class OpenLease(Body, frozen=True, kw_only=True):
    """A lease without blocks. Exactly one of `pool_id` and `pool_name` is given."""

    pool_id: PoolId | None = None
    pool_name: Name | None = None
    name: Name
    tenant: TenantName = ""
    token: Token | None = None
    """What proves that one may adopt it; None: the worker makes one."""
    ttl_s: TtlS = 0.0
    """It ends when it is not renewed for so long, and is bound to no connection; 0: it is bound to this one."""
    keep_s: KeepS = 0.0
    """How long its blocks stay, for one who adopts it, when its owner has died."""
    key: Key = 0
    """For one who asks again because no answer came: with this key and `token` the lease that is there is the answer.
    """


class AdoptLease(Body, frozen=True, kw_only=True):
    """Take a lease over from its owner, dead or alive, who can do nothing with it any more."""

    pool_id: PoolId | None = None
    pool_name: Name | None = None
    name: Name
    token: Token
    generation: Id | None = None
    """Refuse a lease that has had another owner since this one."""
    ttl_s: TtlS = 0.0
    keep_s: KeepS = 0.0
    key: Key = 0
    """For one who asks again because no answer came: that it has been adopted with this key is no reason to refuse."""


class RenewLease(Body, frozen=True, kw_only=True):
    lease_id: LeaseId


class CloseLease(Body, frozen=True, kw_only=True):
    """Give back everything that the lease holds."""

    lease_id: LeaseId


class ComputedBlocks(Value, frozen=True, kw_only=True):
    ids: Ids
    hashes: Hashes
    """One for each block."""
    era: Id | None = None
    """That of the prefix that they go on from: what was computed before everything was forgotten is not kept."""


class TakeStep(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Commit, retain, free and allocate, in this order: all of it or nothing."""

    lease_id: LeaseId
    key: Key = 0
    commit: dict[Group, ComputedBlocks] = msgspec.field(default_factory=dict)
    retain: dict[Group, Ids] = msgspec.field(default_factory=dict)
    free: dict[Group, Ids] = msgspec.field(default_factory=dict)
    allocate: Counts = msgspec.field(default_factory=dict)
    as_runs: bool = False
    wait_s: WaitS = 0.0
    """How long it may wait for room."""


class TakePrefix(Body, frozen=True, kw_only=True):
    """Hold the longest cached beginning of a prompt."""

    lease_id: LeaseId
    key: Key = 0
    hashes: list[Hashes]
    """By group, of the prompt's whole blocks in order."""
    at_most_tokens: Count


class FindPrefix(Body, frozen=True, kw_only=True):
    """As `TakePrefix`, but only look."""

    lease_id: LeaseId
    hashes: list[Hashes]
    at_most_tokens: Count


class Reserve(Body, frozen=True, kw_only=True):
    """Set blocks aside, to be committed or given back."""

    lease_id: LeaseId
    blocks: Counts
    wait_s: WaitS = 0.0
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_RESERVED_S)] = 60.0
    """After which it is given back."""


class CommitReservation(Body, frozen=True, kw_only=True):
    lease_id: LeaseId
    key: Key = 0
    reservation_id: ReservationId
    blocks: Counts | None = None
    """None: all of it."""


class EndReservation(Body, frozen=True, kw_only=True):
    lease_id: LeaseId
    reservation_id: ReservationId


class DescribeLease(Body, frozen=True, kw_only=True):
    lease_id: LeaseId


class ListHeld(Body, frozen=True, kw_only=True):
    """Blocks of one group that the lease holds, without those that are reserved."""

    lease_id: LeaseId
    group: Group
    after: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Ids above this one only."""


class InspectBlocks(Body, frozen=True, kw_only=True):
    """Whether others hold blocks, or may find them."""

    lease_id: LeaseId
    group: Group
    ids: Ids


class FindContents(Body, frozen=True, kw_only=True):
    """Which blocks hold these contents; none of them is held by this."""

    lease_id: LeaseId
    group: Group
    hashes: Hashes


# --- replies ---------------------------------------------------------------------------------------------------------


class LeaseOpened(Body, frozen=True, kw_only=True):
    pool_id: PoolId
    lease_id: LeaseId
    token: Token | None
    """Of a lease that was opened; None for one that was adopted."""
    generation: Id
    """How often it has had an owner."""
    tenant: TenantName
    salt: bytes
    """What the hashes of this tenant's prefixes begin with."""
    blocks: list[Count]
    """By group: how many it holds."""
    clears_on_reuse: list[bool]
    """By group: whether its blocks are to be cleared each time, also when their holder uses them again."""


class LeaseRenewed(Body, frozen=True, kw_only=True):
    lease_id: LeaseId
    ttl_s: float


class LeaseClosed(Body, frozen=True, kw_only=True):
    lease_id: LeaseId


class Granted(Body, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks that the lease holds now."""

    ids: dict[Group, Ids] = msgspec.field(default_factory=dict)
    clear: dict[Group, Ids] = msgspec.field(default_factory=dict)
    """Those of them whose bytes may be another's: write zeros before anything else."""


class PrefixTaken(Body, frozen=True, kw_only=True):
    era: Id
    """How often everything cached was forgotten."""
    num_tokens: Count
    ids: list[Ids]
    """By group: the blocks of the prefix that are needed, the last one ending with it."""


class PrefixFound(Body, frozen=True, kw_only=True):
    era: Id
    num_tokens: Count
    ids: list[Ids]
    num_revived: list[Count]
    """By group: blocks of it that nobody holds now, so that there are as many fewer to be had once they are taken."""


class Reserved(Body, frozen=True, kw_only=True):
    reservation_id: ReservationId


class ReservationEnded(Body, frozen=True, kw_only=True):
    reservation_id: ReservationId


class HeldList(Body, frozen=True, kw_only=True):
    ids: Ids
    """Ascending."""
    times: bytes
    """How often it holds each, u32 little-endian."""
    is_last: bool


class BlocksInspected(Body, frozen=True, kw_only=True):
    times: bytes
    """How often each is held, by all leases together, u32 little-endian."""
    is_cached: bytes
    """A byte each: 1 where others find its content."""


class ContentsFound(Body, frozen=True, kw_only=True):
    ids: Ids
    """A block for each hash; 0 where there is none."""


class LeaseDescribed(Body, frozen=True, kw_only=True):
    pool_id: PoolId
    lease: LeaseState


RequestBody: TypeAlias = (
    OpenLease
    | AdoptLease
    | RenewLease
    | CloseLease
    | TakeStep
    | TakePrefix
    | FindPrefix
    | Reserve
    | CommitReservation
    | EndReservation
    | DescribeLease
    | ListHeld
    | InspectBlocks
    | FindContents
    | DescribeBlocks
    | MapBlocks
    | SetTenants
    | ReadEvents
    | ListContents
    | ClearContents
)
ReplyBody: TypeAlias = (
    LeaseOpened
    | LeaseRenewed
    | LeaseClosed
    | Granted
    | PrefixTaken
    | PrefixFound
    | Reserved
    | ReservationEnded
    | HeldList
    | BlocksInspected
    | ContentsFound
    | BlocksState
    | BlockMap
    | LeaseDescribed
    | TenantsSet
    | EventList
    | ContentList
    | ContentsCleared
)
