"""What messages about leases and blocks are made of, and their limits."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

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
