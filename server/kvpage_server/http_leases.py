"""Leases as HTTP has them: they live by time, every request about one renews it, and its id is all that it takes."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from kvpage.errors import (
    Draining,
    KvpageError,
    NotFound,
    OutOfBlocks,
    ProtocolError,
    RateLimited,
    StaleHandle,
    WorkerLost,
    shorten,
)
from kvpage.wire import leasing, messages
from kvpage_server.device_link import DeviceLink
from kvpage_server.lease_keys import LeaseKeys
from kvpage_server.supervisor import Supervisor

MAX_WAITING = 256
"""Requests that wait for blocks at the same time; each takes a connection."""
MAX_KNOWN_LEASES = 4096

_LEASE_ID = re.compile(r"lease-[0-9a-f]{16}")
_RENEWALS = 3
"""While a request waits, its lease is renewed so often before it would end."""

_Body = TypeVar("_Body", bound=messages.Body)
_Result = TypeVar("_Result")


@dataclass(slots=True, kw_only=True, eq=False)
class KnownLease:
    """What is remembered here. Nothing of it is needed: another server goes on without."""

    lease_id: str
    pool_id: str
    ttl_s: float
    keys: LeaseKeys = field(default_factory=LeaseKeys)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLease:
    link: DeviceLink
    known: KnownLease

    @property
    def lease_id(self) -> str:
        return self.known.lease_id

    @property
    def renewal(self) -> leasing.RenewLease:
        return leasing.RenewLease(lease_id=self.known.lease_id)

    async def look(self, body: messages.RequestBody, kind: type[_Body]) -> _Body:
        """Ask without renewing the lease."""
        return await self.link.ask(body, kind)

    async def ask(self, body: messages.RequestBody, kind: type[_Body]) -> _Body:
        return await self.link.ask_after(self.renewal, body, kind)


class HttpLeases:
    def __init__(self, pools: Supervisor) -> None:
        self._pools = pools
        self._known: OrderedDict[str, KnownLease] = OrderedDict()
        self._num_waiting = 0

    def __repr__(self) -> str:
        return f"<HttpLeases {len(self._known)} known, {self._num_waiting} waiting>"

    async def begin(self, pool_id: str, body: leasing.OpenLease | leasing.AdoptLease) -> leasing.LeaseOpened:
        """Open or adopt one."""
        if self._pools.is_draining:
            raise Draining("the server is shutting down and begins no more leases")
        owner = await self._pools.owner(pool_id)
        opened = await owner.link.ask(body, leasing.LeaseOpened)
        self._note(KnownLease(lease_id=opened.lease_id, pool_id=pool_id, ttl_s=body.ttl_s))
        return opened

    async def find(self, pool_id: str, lease_id: str) -> FoundLease:
        """Raises `PoolNotFound`, `NotFound` for what is no id of a lease, `StaleHandle` where the pool has no such."""
        owner = await self._pools.owner(pool_id)
        if not _LEASE_ID.fullmatch(lease_id):
            raise NotFound(f"{shorten(repr(lease_id))} is no id of a lease; use the lease_id that opening one gave")
        known = self._known.get(lease_id)
        if known is None:
            described = await owner.link.ask(leasing.DescribeLease(lease_id=lease_id), leasing.LeaseDescribed)
            known = KnownLease(lease_id=lease_id, pool_id=described.pool_id, ttl_s=described.lease.ttl_s)
            self._note(known)
        self._known.move_to_end(lease_id)
        if known.pool_id != pool_id:
            raise _no_lease()
        return FoundLease(link=owner.link, known=known)

    def forget(self, lease_id: str) -> None:
        self._known.pop(lease_id, None)

    def _note(self, known: KnownLease) -> None:
        self._known[known.lease_id] = known
        if len(self._known) > MAX_KNOWN_LEASES:
            self._known.popitem(last=False)

    async def once(
        self, lease: FoundLease, key: int, request: bytes, work: Callable[[], Awaitable[_Result]]
    ) -> _Result:
        """`work`, done once for each `key`, of which `request` is all that makes it. Raises as `LeaseKeys.begin`."""
        lease.known.keys.begin(key, request)
        was_refused = False
        try:
            return await work()
        except (WorkerLost, ProtocolError):
            raise  # it may have been done
        except KvpageError:
            was_refused = True
            raise
        finally:
            lease.known.keys.ended(key, was_refused=was_refused)

    async def ask_patiently(
        self, request: Request, lease: FoundLease, ask: Callable[[float], messages.RequestBody], kind: type[_Body],
        wait_s: float,
    ) -> _Body:  # fmt: skip
        """What `ask(0)` gives; where there are too few blocks, wait for them as long as the client is there."""
        try:
            return await lease.ask(ask(0.0), kind)
        except OutOfBlocks:
            if not wait_s:
                raise
        if self._num_waiting >= MAX_WAITING:
            raise RateLimited(f"{MAX_WAITING} requests wait for blocks already; try again later")
        self._num_waiting += 1
        try:
            return await self._waited(request, lease, ask(wait_s), kind, wait_s)
        finally:
            self._num_waiting -= 1

    async def _waited(
        self, request: Request, lease: FoundLease, body: messages.RequestBody, kind: type[_Body], wait_s: float
    ) -> _Body:
        asking = asyncio.ensure_future(_asked_apart(lease.link, body, kind, wait_s))
        gone = asyncio.ensure_future(_disconnected(request))
        stop = asyncio.ensure_future(self._pools.stopping.wait())
        ends = {asking, gone, stop}
        try:
            while True:
                pause_s = lease.known.ttl_s / _RENEWALS
                done, _ = await asyncio.wait(ends, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                if asking in done:
                    return asking.result()
                if gone in done:
                    raise ClientDisconnect
                if stop in done:
                    raise Draining("the server is shutting down, and nobody waits for blocks any longer")
                await lease.look(lease.renewal, leasing.LeaseRenewed)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)  # the connection is closed now


async def _asked_apart(link: DeviceLink, body: messages.RequestBody, kind: type[_Body], wait_s: float) -> _Body:
    worker = await link.open_apart()
    try:
        return await worker.ask(body, kind, wait_s=wait_s)
    finally:
        worker.close()


async def _disconnected(request: Request) -> None:
    """Its body has been read: the next that comes is its end."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _no_lease() -> StaleHandle:
    return StaleHandle(
        "the pool has no such lease for you: it was closed, its time ran out, or another has adopted it; open a lease,"
        " or adopt this one by its name and token"
    )
