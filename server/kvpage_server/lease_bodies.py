"""What requests about leases carry, and what it is in the worker's terms."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvpage.wire import leasing
from kvpage.wire.leasing import Count, Group
from kvpage.wire.values import Id, Name

DEFAULT_TTL_S = 30.0
MAX_WAIT_S = 60.0

TtlS = Annotated[float, Meta(gt=0, le=leasing.MAX_TTL_S)]
WaitS = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]

_Value = TypeVar("_Value")
_GROUP_NAMES = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,3})$"}}
ByGroup = Annotated[dict[Group, _Value], Meta(extra_json_schema=_GROUP_NAMES)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class LeaseRequest(_Body, frozen=True, kw_only=True):
    name: Name
    ttl_s: TtlS = DEFAULT_TTL_S
    """It ends when it is not renewed for so long."""
    tenant: leasing.TenantName = ""
    token: leasing.Token | None = None
    """What proves that one may adopt it; null: the worker makes one."""


class LeaseAdoption(_Body, frozen=True, kw_only=True):
    name: Name
    token: leasing.Token
    ttl_s: TtlS = DEFAULT_TTL_S
    generation: Id | None = None
    """Refuse a lease that has had another owner since this one."""


class ComputedBlocks(_Body, frozen=True, kw_only=True):
    ids: list[BlockId]
    hashes: list[Hash]
    """One for each block, in hex."""


class LeaseBatch(_Body, frozen=True, kw_only=True):
    """Commit, retain, free and allocate, by group and in this order: all of it or nothing."""

    commit: ByGroup[ComputedBlocks] = {}
    retain: ByGroup[list[BlockId]] = {}
    free: ByGroup[list[BlockId]] = {}
    allocate: ByGroup[Count] = {}
    as_runs: bool = False
    """Whether the blocks of each group must follow each other."""
    wait_s: WaitS = 0.0
    """How long it may wait for room."""


class PrefixRequest(_Body, frozen=True, kw_only=True):
    hashes: list[list[Hash]]
    """By group, of the prompt's whole blocks in order, in hex."""
    at_most_tokens: Count


class ReservationRequest(_Body, frozen=True, kw_only=True):
    blocks: ByGroup[Count]
    wait_s: WaitS = 0.0
    """How long it may wait for room."""
    ttl_s: Annotated[float, Meta(gt=0, le=leasing.MAX_RESERVED_S)] = 60.0
    """After which it is given back."""


class ReservationCommit(_Body, frozen=True, kw_only=True):
    blocks: ByGroup[Count] | None = None
    """null: all of it."""


class TenantRequest(_Body, frozen=True, kw_only=True):
    quota_bytes: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """Most bytes of blocks that its leases may hold; null: no limit."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """The higher is served strictly before the lower."""
    weight: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Its share among those of the same priority."""


def step(lease_id: str, key: int, batch: LeaseBatch, wait_s: float) -> leasing.TakeStep:
    return leasing.TakeStep(
        lease_id=lease_id,
        key=key,
        commit={
            group: leasing.ComputedBlocks(ids=packed(some.ids), hashes=packed_hashes(some.hashes))
            for group, some in batch.commit.items()
        },
        retain=_all_packed(batch.retain),
        free=_all_packed(batch.free),
        allocate=batch.allocate,
        as_runs=batch.as_runs,
        wait_s=wait_s,
    )


def _all_packed(ids: Mapping[int, list[int]]) -> dict[int, bytes]:
    return {group: packed(some) for group, some in ids.items()}


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def unpacked(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def packed_hashes(hashes: list[str]) -> bytes:
    return bytes.fromhex("".join(hashes))


def unpacked_hashes(data: bytes) -> list[str]:
    text = data.hex()
    return [text[start : start + 32] for start in range(0, len(text), 32)]
