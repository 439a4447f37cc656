"""Leases over HTTP: for schedulers that do not run where the worker does.

    with client.create_lease(pool.id, name="scheduler-0") as lease:
        blocks = lease.allocate_all({0: 12, 1: 3})

They live by time: any request renews one, and `renew` does nothing else. Nothing renews them in the background.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from kvpage.client.block_resources import GrantedBlocks, HeldPage, LeaseState, OpenedLease
from kvpage.client.calls import Call
from kvpage.client.lease_calls import LeaseCalls
from kvpage.client.patience import Patience
from kvpage.errors import DeviceUnavailable, Draining, PoolNotFound, StaleHandle, WorkerLost
from kvpage.pages.arrays import Ints
from kvpage.pages.batches import Ids, block_ids
from kvpage.pages.block_lease import BlockLease, Clear, FoundPrefix, Reservation, must_be_cleared
from kvpage.pages.leased_pool import HeldBlocks
from kvpage.pages.steps import Content, Counts, Grant, Step, new_key

if TYPE_CHECKING:
    from kvpage.client.async_http import AsyncClient
    from kvpage.client.http import Client

_Result = TypeVar("_Result")
_LOST = (WorkerLost, Draining, DeviceUnavailable)


class HttpLease(BlockLease):
    """Made by `Client.create_lease` and `Client.adopt_lease`. What a worker's death interrupts is asked again of its
    successor, and done once.
    """

    def __init__(
        self, client: Client, opened: OpenedLease, *, name: str, token: str, clear: Clear | None, timeout_s: float
    ) -> None:
        super().__init__(clear)
        self._client, self._opened = client, opened
        self._name, self._token, self._timeout_s = name, token, timeout_s
        self._calls = LeaseCalls(opened.pool_id, opened.lease_id)
        self._closed = False

    def __repr__(self) -> str:  # without what would let others use it
        return f"<HttpLease {self._name} of {self._opened.pool_id}, {'closed' if self._closed else 'open'}>"

    @property
    def name(self) -> str:
        return self._name

    @property
    def token(self) -> str:
        return self._token

    @property
    def salt(self) -> bytes:
        return bytes.fromhex(self._opened.salt)

    @property
    def generation(self) -> int:
        """How often the lease has had an owner, this one included."""
        return self._opened.generation

    @property
    def num_blocks(self) -> Sequence[int]:
        """By group: blocks that it held when this owner got it."""
        return self._opened.blocks

    @property
    def clears_on_reuse(self) -> Sequence[bool]:
        """By group: whether its blocks are to be cleared each time they are used anew."""
        return self._opened.clears_on_reuse

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            with suppress(StaleHandle, PoolNotFound):  # another has it, or it has ended
                self._ask(self._calls.close)
            self._closed = True

    def renew(self) -> float:
        """Seconds until it ends, if nothing is asked of it meanwhile. Raises `StaleHandle` where it has ended."""
        return self._ask(self._calls.renew).expires_in_s

    def state(self) -> LeaseState:
        """What the worker has noted. Does not renew the lease."""
        return self._ask(self._calls.state)

    def _ask(self, call: Callable[[], Call[_Result]]) -> _Result:
        if self._closed:
            raise StaleHandle(f"lease {self._name} is closed; open another")
        patience = Patience(self._timeout_s)
        while True:
            try:
                return self._client._run(call())
            except _LOST as error:
                patience.wait(error)

    def _take(self, step: Step, wait_s: float) -> Grant:
        key, body = step.key or self.new_key(), _batch(step, wait_s)
        return _grant(self._ask(lambda: self._calls.batch(body, key=key, wait_s=wait_s)))

    def held(self) -> dict[int, HeldBlocks]:
        found = {}
        for group in range(len(self._opened.blocks)):
            blocks = _held(self._ask(lambda group=group: self._calls.held(group)))  # type: ignore[misc]
            if len(blocks.ids):
                found[group] = blocks
        return found

    def find_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        found = self._ask(lambda: self._calls.find_prefix(hashes, at_most_tokens))
        return FoundPrefix(found.num_tokens, tuple(map(_ints, found.ids)), tuple(found.num_revived))

    def take_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        key = self.new_key()
        taken = self._ask(lambda: self._calls.take_prefix(hashes, at_most_tokens, key=key))
        return FoundPrefix(taken.num_tokens, tuple(map(_ints, taken.ids)))

    def reserve(self, counts: Counts, *, wait_s: float = 0.0, ttl_s: float = 60.0) -> HttpReservation:
        reserved = self._ask(lambda: self._calls.reserve(counts, wait_s=wait_s, ttl_s=ttl_s))
        return HttpReservation(self, reserved.reservation_id)

    def _commit_reservation(self, reservation_id: str, counts: Counts | None) -> Grant:
        key = self.new_key()
        granted = self._ask(lambda: self._calls.commit_reservation(reservation_id, counts, key=key))
        return self._cleared(_grant(granted))

    def _end_reservation(self, reservation_id: str) -> None:
        self._ask(lambda: self._calls.end_reservation(reservation_id))


class HttpReservation(Reservation):
    """Made by `HttpLease.reserve`. It is lost, and its blocks with it, when the worker dies."""

    def __init__(self, lease: HttpLease, reservation_id: str) -> None:
        self._lease, self._reservation_id = lease, reservation_id

    def commit(self, counts: Counts | None = None) -> Grant:
        return self._lease._commit_reservation(self._reservation_id, counts)

    def give_back(self) -> None:
        self._lease._end_reservation(self._reservation_id)


class AsyncHttpLease:
    """Made by `AsyncClient.create_lease` and `AsyncClient.adopt_lease`: the steps of a lease, to be awaited. Whoever
    takes blocks with it clears what the grant names. One task at a time.
    """

    def __init__(self, client: AsyncClient, opened: OpenedLease, *, name: str, token: str, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._calls = LeaseCalls(opened.pool_id, opened.lease_id)
        self._opened = opened
        self.name, self.token = name, token
        self.salt = bytes.fromhex(opened.salt)
        self.closed = False

    def __repr__(self) -> str:
        return f"<AsyncHttpLease {self.name} of {self._opened.pool_id}, {'closed' if self.closed else 'open'}>"

    @property
    def generation(self) -> int:
        """How often the lease has had an owner, this one included."""
        return self._opened.generation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Everything that it holds is given back. May be called twice."""
        if not self.closed:
            with suppress(StaleHandle, PoolNotFound):
                await self._ask(self._calls.close)
            self.closed = True

    async def renew(self) -> float:
        """As `HttpLease.renew`."""
        return (await self._ask(self._calls.renew)).expires_in_s

    async def state(self) -> LeaseState:
        return await self._ask(self._calls.state)

    async def step(self, step: Step, *, wait_s: float = 0.0) -> Grant:
        """As `BlockLease.step`."""
        key, body = step.key or new_key(), _batch(step, wait_s)
        return _grant(await self._ask(lambda: self._calls.batch(body, key=key, wait_s=wait_s)))

    async def allocate_all(self, counts: Counts, *, wait_s: float = 0.0, as_runs: bool = False) -> dict[int, Ints]:
        """For every group its number of block ids, or nothing. Raises as `step`, and `Conflict`, having given them
        back, where blocks must be cleared: take a `step` then.
        """
        grant = await self.step(Step(allocate=counts, as_runs=as_runs), wait_s=wait_s)
        if grant.clear:
            await self.step(Step(free=grant.ids))
            raise must_be_cleared(grant.clear)
        return {group: grant.ids.get(group, np.empty(0, np.int32)) for group in counts}

    async def allocate(self, group: int, count: int, *, wait_s: float = 0.0) -> Ints:
        """As `allocate_all` of one group."""
        return (await self.allocate_all({group: count}, wait_s=wait_s))[group]

    async def allocate_run(self, group: int, count: int, *, wait_s: float = 0.0) -> Ints:
        """As `BlockLease.allocate_run`."""
        return (await self.allocate_all({group: count}, wait_s=wait_s, as_runs=True))[group]

    async def free(self, group: int, ids: Ids) -> None:
        """As `BlockLease.free`."""
        await self.step(Step(free={group: ids}))

    async def retain(self, group: int, ids: Ids) -> None:
        """As `BlockLease.retain`."""
        await self.step(Step(retain={group: ids}))

    async def commit(self, group: int, ids: Ids, hashes: Sequence[bytes]) -> None:
        """As `BlockLease.commit`."""
        await self.step(Step(commit={group: Content(ids, hashes)}))

    async def held(self, group: int) -> HeldBlocks:
        """What it holds of one group, without what is reserved."""
        return _held(await self._ask(lambda: self._calls.held(group)))

    async def find_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        found = await self._ask(lambda: self._calls.find_prefix(hashes, at_most_tokens))
        return FoundPrefix(found.num_tokens, tuple(map(_ints, found.ids)), tuple(found.num_revived))

    async def take_prefix(self, hashes: Sequence[Sequence[bytes]], at_most_tokens: int) -> FoundPrefix:
        key = new_key()
        taken = await self._ask(lambda: self._calls.take_prefix(hashes, at_most_tokens, key=key))
        return FoundPrefix(taken.num_tokens, tuple(map(_ints, taken.ids)))

    async def reserve(self, counts: Counts, *, wait_s: float = 0.0, ttl_s: float = 60.0) -> str:
        """The id of a reservation."""
        return (await self._ask(lambda: self._calls.reserve(counts, wait_s=wait_s, ttl_s=ttl_s))).reservation_id

    async def commit_reservation(self, reservation_id: str, counts: Counts | None = None) -> Grant:
        key = new_key()
        return _grant(await self._ask(lambda: self._calls.commit_reservation(reservation_id, counts, key=key)))

    async def end_reservation(self, reservation_id: str) -> None:
        await self._ask(lambda: self._calls.end_reservation(reservation_id))

    async def _ask(self, call: Callable[[], Call[_Result]]) -> _Result:
        if self.closed:
            raise StaleHandle(f"lease {self.name} is closed; open another")
        patience = Patience(self._timeout_s)
        while True:
            try:
                return await self._client._run(call())
            except _LOST as error:
                await asyncio.sleep(patience.pause_s(error))


def _batch(step: Step, wait_s: float) -> dict[str, Any]:
    """Raises `SpecInvalid` for what can be no block ids."""
    return {
        "commit": {
            group: {"ids": _listed(content.ids), "hashes": [one.hex() for one in content.hashes]}
            for group, content in step.commit.items()
        },
        "retain": {group: _listed(ids) for group, ids in step.retain.items()},
        "free": {group: _listed(ids) for group, ids in step.free.items()},
        "allocate": dict(step.allocate),
        "as_runs": step.as_runs,
        "wait_s": wait_s,
    }


def _listed(ids: Ids) -> list[int]:
    listed: list[int] = block_ids(ids).tolist()
    return listed


def _ints(ids: Sequence[int]) -> Ints:
    return np.array(ids, np.int32)


def _grant(granted: GrantedBlocks) -> Grant:
    ids = {group: _ints(some) for group, some in granted.ids.items()}
    return Grant(ids=ids, clear={group: _ints(some) for group, some in granted.clear.items()})


def _held(pages: list[HeldPage]) -> HeldBlocks:
    ids = list(chain.from_iterable(page.ids for page in pages))
    return HeldBlocks(_ints(ids), _ints(list(chain.from_iterable(page.times for page in pages))))
