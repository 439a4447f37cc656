"""The blocks of one pool, as its worker serves them. Imports NumPy, which a worker without leases never needs."""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np

from kvpage.errors import SpecInvalid, TooLarge
from kvpage.pages.clearing import Clearing
from kvpage.pages.events import EventLog
from kvpage.pages.geometry import Geometry
from kvpage.pages.hashing import HASH_BYTES
from kvpage.pages.leased_pool import LeasedPool
from kvpage.pages.leases import Lease
from kvpage.pages.pool_buffer import pool_buffer_bytes
from kvpage.pages.reservations import commit_reservation, reserve
from kvpage.pages.steps import Content, Grant, Step
from kvpage.pages.waiting_room import WaitingRoom
from kvpage.plans import Plan
from kvpage.wire import leasing

MAX_IDS_LISTED = 500_000  # with how often each is held, half of what a frame takes
MAX_LOOKED_AT = 100_000
"""Blocks or hashes of one group in a request that looks at each of them."""
LATENCY_BOUNDS_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 1e-1)

_ID = struct.Struct("<I")
_NOTHING = leasing.Granted()


class PoolBlocks:
    def __init__(self, plan: Plan, state: mmap.mmap, clock: Callable[[], float]) -> None:
        """`state`: the pool's block state, which this owns from now on. Raises `Conflict` where it is not sound."""
        self.events = EventLog()
        self.pool = LeasedPool(plan, state, events=self.events)
        self.room = WaitingRoom(self.pool, clock)
        self.clearing = Clearing.of(plan)
        self.padding_bytes = [_padding_bytes(plan, group) for group in range(len(plan.groups))]
        self.step_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.steps_s = 0.0
        self.num_allocated = [0] * len(plan.groups)
        self.num_opened = 0

    def close(self) -> None:
        """Let go of the block state, which is unmapped when nobody refers to it any more."""
        self.pool.close()

    def _allocated(self, counts: leasing.Counts) -> None:
        for group, count in counts.items():
            self.num_allocated[group] += count

    def took(self, seconds: float) -> None:
        """A step has taken so long."""
        self.step_counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.steps_s += seconds

    # --- steps --------------------------------------------------------------------------------------------------------

    def quick(self, lease: Lease, body: leasing.TakeStep) -> leasing.Granted | None:
        """Most steps are of one block, and nothing is in their way. None: this is another, and nothing was done."""
        allocate, free = body.allocate, body.free
        if body.commit or body.retain or len(allocate) + len(free) != 1 or self.room.num_waiting():
            return None
        began_s = perf_counter()
        if allocate:
            [(group, count)] = allocate.items()
            block = self.pool.take_quickly(lease, group, body.key) if count == 1 else None
            if block is None:
                return None
            granted = leasing.Granted(ids={group: _ID.pack(block)})
            self.num_allocated[group] += 1
        else:
            [(group, ids)] = free.items()
            if len(ids) != _ID.size or not self.pool.free_quickly(lease, group, _ID.unpack(ids)[0], body.key):
                return None
            granted = _NOTHING
        self.took(perf_counter() - began_s)
        return granted

    def work_of(self, lease: Lease, body: leasing.TakeStep) -> Callable[[], leasing.Granted]:
        """What does the step. Raises `SpecInvalid` for what are no ids or hashes, `TooLarge` for too many blocks."""
        pool = self.pool
        _check_number(body.allocate)
        step = step_of(body)

        def work() -> leasing.Granted:
            grant = pool.do(lease, step)
            self._allocated(body.allocate)
            return granted(grant)

        return work

    def again(self, lease: Lease, key: int) -> leasing.Granted | None:
        """What the step with this key was answered with, if it was the last one of the lease."""
        grant = self.pool.again(lease, key)
        return None if grant is None else granted(grant)

    def reserve(self, lease: Lease, counts: leasing.Counts) -> Lease:
        """Raises as `reservations.reserve`, and `TooLarge`."""
        _check_number(counts)
        reservation = reserve(self.pool, lease, counts)
        self._allocated(counts)
        return reservation

    def commit(self, reservation: Lease, counts: leasing.Counts | None, key: int) -> leasing.Granted:
        """Raises as `reservations.commit_reservation`."""
        return granted(commit_reservation(self.pool, reservation, counts, key))

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def take_prefix(self, lease: Lease, body: leasing.TakePrefix) -> leasing.PrefixTaken:
        match = self.pool.take_prefix(lease, _all_hashes(body.hashes), body.at_most_tokens, body.key)
        return leasing.PrefixTaken(
            era=self.pool.book.era, num_tokens=match.num_tokens, ids=[packed(ids) for ids in match.blocks]
        )

    def find_prefix(self, body: leasing.FindPrefix) -> leasing.PrefixFound:
        match = self.pool.prefix.find(_all_hashes(body.hashes), body.at_most_tokens)
        return leasing.PrefixFound(
            era=self.pool.book.era,
            num_tokens=match.num_tokens,
            ids=[packed(ids) for ids in match.blocks],
            num_revived=list(self.pool.prefix.cache.num_revived(match)),
        )

    # --- looking ------------------------------------------------------------------------------------------------------

    def held(self, lease: Lease, group: int, after: int) -> leasing.HeldList:
        self.pool.blocks.counts(group)  # raises `SpecInvalid` where there is none
        held = self.pool.held(lease).get(group)
        if held is None:
            return leasing.HeldList(ids=b"", times=b"", is_last=True)
        start = int(np.searchsorted(held.ids, after, side="right"))
        end = start + MAX_IDS_LISTED
        return leasing.HeldList(
            ids=packed(held.ids[start:end]), times=packed(held.times[start:end]), is_last=end >= len(held.ids)
        )

    def inspect(self, group: int, data: bytes) -> leasing.BlocksInspected:
        ids = ids_of(data, MAX_LOOKED_AT)
        times = packed(self.pool.blocks.times_held(group, ids))
        is_cached = bytes(self.pool.index.hash_of(group, block) is not None for block in ids.tolist())
        return leasing.BlocksInspected(times=times, is_cached=is_cached)

    def find_contents(self, group: int, data: bytes) -> leasing.ContentsFound:
        self.pool.blocks.counts(group)
        found = self.pool.index.blocks_of(group, hashes_of(data))
        return leasing.ContentsFound(ids=packed(np.array(found, np.uint32)))


def block_state_bytes(plan: Plan) -> int:
    """Size of the block state of a pool. Raises `SpecInvalid` for a plan without blocks."""
    return pool_buffer_bytes(Geometry.of(plan))


def _padding_bytes(plan: Plan, group: int) -> int:
    """Of a block, what no layer's data fills: padding of pages, and room that wider groups need."""
    layers = (plan.layers[name] for name in plan.groups[group].layers)
    data_bytes = sum(layer.real_page_size_bytes for layer in layers if layer.decision != "share")
    return max(0, plan.slab_bytes // plan.groups[group].blocks_per_slab - data_bytes)


def step_of(body: leasing.TakeStep) -> Step:
    """Raises `SpecInvalid` for what are no ids or hashes."""
    commit = {
        group: Content(ids_of(some.ids, MAX_LOOKED_AT), hashes_of(some.hashes), some.era)
        for group, some in body.commit.items()
    }
    retain = {group: ids_of(ids, MAX_LOOKED_AT) for group, ids in body.retain.items()}
    free = {group: ids_of(ids) for group, ids in body.free.items()}
    return Step(key=body.key, commit=commit, retain=retain, free=free, allocate=body.allocate, as_runs=body.as_runs)


def _check_number(counts: leasing.Counts) -> None:
    """Raises `TooLarge` for so many blocks that the answer would not fit into a frame."""
    wanted, limit = sum(counts.values()), leasing.MAX_BLOCKS_GRANTED
    if wanted > limit:
        raise TooLarge(
            f"{wanted} blocks at once; one answer names at most {limit}: take them in several steps",
            details={"wanted": wanted, "limit": limit},
        )


def granted(grant: Grant) -> leasing.Granted:
    if not grant.ids:
        return _NOTHING
    if not grant.clear:
        return leasing.Granted(ids=_all_packed(grant.ids))
    return leasing.Granted(ids=_all_packed(grant.ids), clear=_all_packed(grant.clear))


def _all_packed(ids: Mapping[int, np.ndarray]) -> dict[int, bytes]:
    return {group: packed(some) for group, some in ids.items()}


def packed(ids: np.ndarray) -> bytes:
    return ids.astype("<u4", copy=False).tobytes()


def ids_of(data: bytes, limit: int | None = None) -> np.ndarray:
    """Raises `SpecInvalid` for what are no ids, `TooLarge` for more than `limit`."""
    if len(data) % _ID.size:
        raise SpecInvalid(f"{len(data)} bytes are no block ids, which have {_ID.size} bytes each")
    _check_length(len(data) // _ID.size, limit, "blocks")
    return np.frombuffer(data, "<u4")


def _check_length(count: int, limit: int | None, what: str) -> None:
    if limit is not None and count > limit:
        raise TooLarge(
            f"{count} {what} of a group in one request; at most {limit} are looked at, or others would have to wait:"
            " use several requests",
            details={"count": count, "limit": limit},
        )


def _all_hashes(groups: list[leasing.Hashes]) -> list[list[bytes]]:
    return [hashes_of(some) for some in groups]


def hashes_of(data: bytes) -> list[bytes]:
    """Raises `SpecInvalid` for what are no hashes, `TooLarge` for too many."""
    _check_length(len(data) // HASH_BYTES, MAX_LOOKED_AT, "hashes")
    if len(data) % HASH_BYTES:
        raise SpecInvalid(f"{len(data)} bytes are no hashes, which have {HASH_BYTES} bytes each")
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]
