"""Examples of bodies about leases, for the API's description."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpage.client import block_resources as blocks
from kvpage.pages.hashing import HASH_BYTES

LEASE_ID = "lease-0123456789abcdef"
RESERVATION_ID = "reservation-0123456789abcdef"
TENANT = "team-a"

LEASE_REQUEST: dict[str, Any] = {"name": "scheduler-0", "ttl_s": 30, "tenant": TENANT, "token": "0123456789abcdef" * 2}
_HASHES = ["00" * HASH_BYTES, "11" * HASH_BYTES]
_SALT = "0123456789abcdef" * 2

REQUESTS: dict[str, Any] = {
    "LeaseRequest": LEASE_REQUEST,
    "LeaseAdoption": {"name": "scheduler-0", "token": LEASE_REQUEST["token"], "ttl_s": 30, "generation": 1},
    "LeaseBatch": {
        "commit": {"0": {"ids": [7], "hashes": _HASHES[:1]}},
        "free": {"0": [7, 8], "1": [3]},
        "allocate": {"0": 2, "1": 1},
        "wait_s": 5,
    },
    "PrefixRequest": {"hashes": [_HASHES, _HASHES], "at_most_tokens": 32},
    "ReservationRequest": {"blocks": {"0": 12, "1": 3}, "wait_s": 5, "ttl_s": 60},
    "ReservationCommit": {"blocks": {"0": 4}},
    "TenantRequest": {"quota_bytes": 1 << 20, "priority": 0, "weight": 2},
}


def answers(pool_id: str) -> dict[str, Any]:
    """By schema."""
    lease = blocks.LeaseState(
        name="scheduler-0", tenant=TENANT, state="active", generation=1, pid=4700, client_name="kvpage serve",
        ttl_s=30.0, expires_in_s=29.5, blocks=[2, 1], reserved=[0, 0],
        owner_age_s=3600.5,
    )  # fmt: skip
    tenant = blocks.TenantState(
        name=TENANT, quota_bytes=1 << 20, priority=0, weight=2, used_bytes=110592, num_leases=1, num_waiting=0,
        num_waited=3, num_served=2, num_given_up=1, waited_s=0.25,
    )  # fmt: skip
    values = {
        "OpenedLease": blocks.OpenedLease(
            lease_id=LEASE_ID, pool_id=pool_id, generation=1, tenant=TENANT, salt=_SALT, expires_in_s=30.0,
            blocks=[0, 0], clears_on_reuse=[False, False], token=LEASE_REQUEST["token"],
        ),
        "LeaseList": blocks.LeaseList(num_leases=1, leases=[lease]),
        "LeaseView": blocks.LeaseView(state=lease, held=blocks.HeldPage(group=0, ids=[9, 10], times=[1, 1])),
        "RenewedLease": blocks.RenewedLease(expires_in_s=30.0),
        "GrantedBlocks": blocks.GrantedBlocks(ids={0: [9, 10], 1: [4]}, clear={}),
        "PrefixBlocks": blocks.PrefixBlocks(num_tokens=32, ids=[[7, 8], [3]]),
        "FoundBlocks": blocks.FoundBlocks(num_tokens=32, ids=[[7, 8], [3]], num_revived=[2, 0]),
        "ReservedBlocks": blocks.ReservedBlocks(reservation_id=RESERVATION_ID, expires_in_s=60.0),
        "BlockMap": blocks.BlockMap(
            num_slabs=68, slabs_per_cell=34, owners=[-1, 1], owned=[3, 1], used=[3, 0], shared=[1, 0], cached=[0, 1],
            free=[0, 0], most_held=[2, 0],
        ),
        "TenantList": blocks.TenantList(tenants=[tenant]),
        "TenantState": tenant,
        "ContentsPage": blocks.ContentsPage(group=0, hashes=_HASHES, number=2, cursor="kZO1cG9vbC0w"),
    }  # fmt: skip
    return {name: msgspec.to_builtins(value, str_keys=True) for name, value in values.items()}
