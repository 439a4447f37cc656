"""Messages by which one worker succeeds another: pools of one that died, or everything of one that runs.

All of them are for role `api`. docs/protocol.md says what each does.
"""

from __future__ import annotations

from kvpage.wire.leasing import LeaseId
from kvpage.wire.values import Body, Id, PoolId, Role, Value, WaitS

# --- after a death ---------------------------------------------------------------------------------------------------


class FinishAdoption(Body, frozen=True, kw_only=True):
    """Every pool that was kept for this worker has been offered to it; it may serve its clients."""


class AdoptionFinished(Body, frozen=True, kw_only=True):
    num_pools: Id


# --- while both run --------------------------------------------------------------------------------------------------


class TakenHold(Value, frozen=True, kw_only=True):
    hold_id: Id
    pool_id: PoolId


class TakenLease(Value, frozen=True, kw_only=True):
    lease_id: LeaseId
    hold_id: Id
    pool_id: PoolId


class TakeOver(Body, frozen=True, kw_only=True):
    """Stop serving and be ready to give everything away. Undone when this connection ends before `FinishTakeOver`."""


class TakenOver(Body, frozen=True, kw_only=True):
    """Comes with the descriptor of the listening socket."""

    pool_ids: list[PoolId]
    """To be fetched with `ExportPool`."""
    num_connections: Id
    """To be fetched with `TakeConnection`."""
    next_hold_id: Id
    memory_limit_bytes: Id


class TakeConnection(Body, frozen=True, kw_only=True):
    number: Id
    """From 0; one less than `num_connections` is the last."""


class ConnectionTaken(Body, frozen=True, kw_only=True):
    """One client; comes with the descriptor of its socket, or without one when it has left meanwhile."""

    role: Role | None
    """None before its hello."""
    client_name: str
    holds: list[TakenHold]
    leases: list[TakenLease]
    unacknowledged: Id | None
    """Id of the last reply with descriptors, until the client acknowledges it."""
    unread: bytes
    """Received, but no whole request yet."""
    unsent: bytes
    """Answered, but not taken by the client yet."""


class FinishTakeOver(Body, frozen=True, kw_only=True):
    """The successor has everything and serves from now on. The worker answers and ends."""


class TakeOverFinished(Body, frozen=True, kw_only=True):
    """Comes with the descriptor of the lock file."""


class DrainWorker(Body, frozen=True, kw_only=True):
    """Take no new pools and holds, and end when the last hold has ended."""

    timeout_s: WaitS = 0.0
    """How long that may take; then everything is as before."""
    lose_pools: bool = False
    """End even if nobody else keeps the pools."""


class WorkerDrained(Body, frozen=True, kw_only=True):
    num_pools: Id
    """Pools it had, kept by others or lost."""
