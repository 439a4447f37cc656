"""Messages by which clients lease blocks of a pool. docs/protocol.md says what each does.

Block ids travel as `Ids`, hashes as `Hashes`; groups are numbered as in the pool's plan.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvpage.wire.values import Body, Id, Name, PoolId, SizeBytes, Value, WaitS

MAX_TTL_S = 60.0
MAX_RESERVED_S = 3600.0
MAX_KEEP_S = 86_400.0
MAX_BLOCKS_GRANTED = 1_000_000  # twice, to have and to clear, they fit into a frame
MAX_LEASES_NAMED = 64
"""In a `BlocksState`."""

Group: TypeAlias = Annotated[int, Meta(ge=0, lt=2**15)]
Ids: TypeAlias = bytes
"""Block ids, u32 little-endian each."""
Hashes: TypeAlias = bytes
"""16 bytes each."""
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Counts: TypeAlias = dict[Group, Count]
Key: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
LeaseId: TypeAlias = Annotated[str, Meta(pattern=r"^lease-[0-9a-f]{16}\Z")]
ReservationId: TypeAlias = Annotated[str, Meta(pattern=r"^reservation-[0-9a-f]{16}\Z")]
Token: TypeAlias = Annotated[str, Meta(min_length=16, max_length=256)]
TenantName: TypeAlias = Annotated[str, Meta(max_length=64)]
TtlS: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_TTL_S)]
KeepS: TypeAlias = Annotated[float, Meta(ge=0, le=MAX_KEEP_S)]
LeaseStateName = Literal["active", "quarantined", "kept"]


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


class TakeStep(Body, frozen=True, kw_only=True):
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


class DescribeBlocks(Body, frozen=True, kw_only=True):
    pool_id: PoolId


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
    leases: list[LeaseState]
    """The first `MAX_LEASES_NAMED`."""
    prefix: PrefixState | None
    """None where the plan allows no prefix cache."""
    steps: Latency


class LeaseDescribed(Body, frozen=True, kw_only=True):
    pool_id: PoolId
    lease: LeaseState


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
    | LeaseDescribed
    | TenantsSet
    | EventList
    | ContentList
    | ContentsCleared
)
