"""A lease on a pool of this very process: the same as over a worker's socket, without one.

pool = LeasedPool(plan)
with LocalLease(pool, "engine") as lease:
    blocks = lease.allocate_all({0: 12, 1: 3})
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpage.errors import NotFound, StaleHandle
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids
from kvpage.pages.block_lease import BlockLease, Clear, FoundPrefix, Reservation
from kvpage.pages.leased_pool import HeldBlocks, LeasedPool
from kvpage.pages.leases import Lease
from kvpage.pages.reservations import commit_reservation, reserve
from kvpage.pages.steps import Counts, Grant, Step


class LocalLease(BlockLease):
    """One thread at a time, of all that use the pool; so nothing here waits: `wait_s` is taken for 0."""

    def __init__(
        self,
        pool: LeasedPool,
        name: str,
        *,
        tenant: str = "",
        token: str | None = None,
        clear: Clear | None = None,
    ) -> None:
        """Raises as `LeasedPool.open`. `clear`: see `BlockLease`."""
        super().__init__(clear)
        self._pool = pool
        self._lease, self._token = pool.open(name, tenant=tenant, token=token)
        self._id = self._lease.lease_id
        self._is_closed = False

    @classmethod
    def adopt(cls, pool: LeasedPool, name: str, token: str, *, clear: Clear | None = None) -> LocalLease:
        """The lease of this name, from whoever had it. Raises as `LeasedPool.adopt`."""
        self = cls.__new__(cls)
        BlockLease.__init__(self, clear)
        self._pool, self._token, self._is_closed = pool, token, False
        self._lease = pool.adopt(name, token)
        self._id = self._lease.lease_id
        return self

    @property
    def name(self) -> str:
        return self._lease.record.name

    @property
    def token(self) -> str:
        return self._token

    @property
    def salt(self) -> bytes:
        return self._pool.book.tenant(self._lease.tenant).salt

    @property
    def era(self) -> int:
        """How often everything cached was forgotten."""
        return self._pool.book.era

    @property
    def closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._lease.state != "ended":  # else another has adopted it
                self._pool.close_lease(self._lease)

    def _own(self) -> Lease:
        if self._is_closed:
            raise StaleHandle(f"lease {self.name} is closed; open another")
        return self._pool.book.get(self._id)

    def held(self) -> dict[int, HeldBlocks]:
        return self._pool.held(self._own())

    def reserve(self, counts: Counts, *, wait_s: float = 0.0, ttl_s: float = 60.0) -> LocalReservation:
        return LocalReservation(self._pool, reserve(self._pool, self._own(), counts), self)

    def inspect(self, group: int, ids: Ids) -> tuple[Ints, Ints]:
        """How often each block is held, by all leases together, and whether (1, 0) others find its content."""
        is_cached = [self._pool.index.hash_of(group, int(block)) is not None for block in ids]
        return self._pool.blocks.times_held(group, ids), np.array(is_cached, np.int32)

    def find_contents(self, group: int, hashes: Sequence[bytes]) -> Ints:
        """The block that holds each of these contents, 0 where there is none; holds nothing."""
        return np.array(self._pool.index.blocks_of(group, hashes), np.int32)

    def find_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        prefix = self._pool.prefix
        match = prefix.find(hashes, at_most_tokens)
        return FoundPrefix(match.num_tokens, match.blocks, prefix.cache.num_revived(match))

    def take_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        match = self._pool.take_prefix(self._own(), hashes, at_most_tokens)
        return FoundPrefix(match.num_tokens, match.blocks)

    def _take(self, step: Step, wait_s: float) -> Grant:
        return self._pool.do(self._own(), step)


class LocalReservation(Reservation):
    """Made by `LocalLease.reserve`; its time does not run out."""

    def __init__(self, pool: LeasedPool, reservation: Lease, lease: LocalLease) -> None:
        self._pool, self._reservation, self._lease = pool, reservation, lease

    def commit(self, counts: Counts | None = None) -> Grant:
        self._require_there()
        return self._lease._cleared(commit_reservation(self._pool, self._reservation, counts))

    def give_back(self) -> None:
        self._require_there()
        self._pool.close_lease(self._reservation)

    def _require_there(self) -> None:
        lease = self._lease._own()
        if self._reservation.lease_id not in lease.reservations:
            raise NotFound("the reservation is not there any more: it was committed or given back")
