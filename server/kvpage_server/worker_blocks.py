"""The blocks of one pool, as its worker serves them. Imports NumPy, which a worker without leases never needs."""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np

from kvpage.errors import SpecInvalid
from kvpage.pages.clearing import Clearing
from kvpage.pages.events import EventLog
from kvpage.pages.geometry import Geometry
from kvpage.pages.hashing import HASH_BYTES
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.pool_buffer import pool_buffer_bytes
from kvpage.pages.steps import Content, Grant, Step
from kvpage.pages.waiting_room import WaitingRoom
from kvpage.plans import Plan
from kvpage.wire import leasing

LATENCY_BOUNDS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)


class PoolBlocks:
    def __init__(self, plan: Plan, state: mmap.mmap, clock: Callable[[], float]) -> None:
        """`state`: the pool's block state, which this owns from now on. Raises `Conflict` where it is not sound."""
        self.events = EventLog()
        self.pool = LeasedPool(plan, state, events=self.events)
        self.room = WaitingRoom(self.pool, clock)
        self.clearing = Clearing.of(plan)
        self.step_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.steps_s = 0.0

    def close(self) -> None:
        """Let go of the block state, which is unmapped when nobody refers to it any more."""
        self.pool.close()

    def took(self, seconds: float) -> None:
        """A step has taken so long."""
        self.step_counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.steps_s += seconds


def block_state_bytes(plan: Plan) -> int:
    """Size of the block state of a pool. Raises `SpecInvalid` for a plan without blocks."""
    return pool_buffer_bytes(Geometry.of(plan))


def step_of(body: leasing.TakeStep) -> Step:
    """Raises `SpecInvalid` for what are no ids or hashes."""
    commit = {group: Content(ids_of(some.ids), hashes_of(some.hashes), some.era) for group, some in body.commit.items()}
    retain = {group: ids_of(ids) for group, ids in body.retain.items()}
    free = {group: ids_of(ids) for group, ids in body.free.items()}
    return Step(
        key=body.key, commit=commit, retain=retain, free=free, allocate=body.allocate, as_runs=body.as_runs
    )  # fmt: skip


def granted(grant: Grant) -> leasing.Granted:
    return leasing.Granted(ids=_all_packed(grant.ids), clear=_all_packed(grant.clear))


def _all_packed(ids: Mapping[int, np.ndarray]) -> dict[int, bytes]:
    return {group: packed(some) for group, some in ids.items()}


def packed(ids: np.ndarray) -> bytes:
    return ids.astype("<u4", copy=False).tobytes()


def ids_of(data: bytes) -> np.ndarray:
    if len(data) % 4:
        raise SpecInvalid(f"{len(data)} bytes are no block ids, which have 4 bytes each")
    return np.frombuffer(data, "<u4")


def hashes_of(data: bytes) -> list[bytes]:
    if len(data) % HASH_BYTES:
        raise SpecInvalid(f"{len(data)} bytes are no hashes, which have {HASH_BYTES} bytes each")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]
