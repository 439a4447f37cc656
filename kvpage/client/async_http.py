"""`Client` for programs that run an event loop: the same methods, to be awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Self, TypeVar

import httpx

from kvpage.client import calls, fleet_calls, lease_calls
from kvpage.client.address import DEFAULT_TIMEOUT_S, Address, check_usable
from kvpage.client.block_resources import BlockMap, ContentsPage, LeaseState, TenantState
from kvpage.client.calls import Answer, Call, Collected, Request
from kvpage.client.events import Event, EventReading
from kvpage.client.fleet_resources import Fleet, FleetPlan, Place
from kvpage.client.resources import Device, ForgottenPool, Health, Pool, PoolTensors
from kvpage.client.trust import server_trust
from kvpage.client.unix_transport import AsyncUnixTransport
from kvpage.errors import KvpageError
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan

if TYPE_CHECKING:
    from kvpage.client.http_lease import AsyncHttpLease

_Result = TypeVar("_Result")


class AsyncClient:
    """Mirrors `Client`, whose documentation holds here; use `async with`, or await `close()`.

    Belongs to one event loop. Any number of its tasks may use it at once.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        run_dir: str | None = None,
        token: str | None = None,
        ca_file: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """As `Client`."""
        address = self._address = Address.of(url, run_dir, token, timeout_s)
        self._pid = os.getpid()
        if transport is None and address.socket_path is not None:
            transport = AsyncUnixTransport(address.socket_path)
        self._http = httpx.AsyncClient(
            base_url=address.url,
            headers=address.headers,
            timeout=timeout_s,
            transport=transport,
            trust_env=False,
            verify=server_trust(ca_file),
        )

    def __repr__(self) -> str:
        return f"<kvpage.AsyncClient {self._address.place} {'closed' if self.closed else 'open'}>"

    @property
    def closed(self) -> bool:
        return self._http.is_closed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def plan(self, request: object) -> Plan:
        return await self._run(calls.plan(request))

    async def plan_ranks(self, request: object) -> RankedPlan:
        return await self._run(calls.plan_ranks(request))

    async def get_plan(self, plan_id: str) -> Plan:
        return await self._run(calls.get_plan(plan_id))

    async def layout_svg(self, plan_id: str) -> str:
        return await self._run(calls.layout_svg(plan_id))

    async def create_pool(
        self,
        request: object,
        *,
        name: str,
        device: str = "host",
        rank: int | None = None,
        plan_id: str | None = None,
        handle_kind: str | None = None,
        wait_s: float = 30.0,
    ) -> Pool:
        return await self._run(
            calls.create_pool(
                request,
                name=name,
                device=device,
                rank=rank,
                plan_id=plan_id,
                handle_kind=handle_kind,
                wait_s=wait_s,
            )
        )

    async def pools(self) -> list[Pool]:
        return await self._run(calls.pools())

    async def get_pool(self, pool_id: str, *, wait_s: float = 0.0) -> Pool:
        return await self._run(calls.get_pool(pool_id, wait_s=wait_s))

    async def find_pool(self, name: str, device: str | None = None) -> Pool:
        return await self._run(calls.find_pool(name, device))

    async def delete_pool(self, pool_id: str, *, wait_s: float = 0.0, force: bool = False) -> ForgottenPool | None:
        return await self._run(calls.delete_pool(pool_id, wait_s=wait_s, force=force))

    async def pool_tensors(self, pool_id: str) -> PoolTensors:
        return await self._run(calls.pool_tensors(pool_id))

    async def fleet(self) -> Fleet:
        return await self._run(fleet_calls.fleet())

    async def create_fleet_plan(
        self, request: object, *, name: str, places: list[Place] | None = None, wait_s: float = 600.0
    ) -> FleetPlan:
        return await self._run(fleet_calls.create_fleet_plan(request, name=name, places=places, wait_s=wait_s))

    async def get_fleet_plan(self, plan_id: str) -> FleetPlan:
        return await self._run(fleet_calls.get_fleet_plan(plan_id))

    async def delete_fleet_plan(self, plan_id: str, *, force: bool = False) -> FleetPlan | None:
        return await self._run(fleet_calls.delete_fleet_plan(plan_id, force=force))

    async def create_lease(
        self, pool_id: str, *, name: str, ttl_s: float = 30.0, tenant: str = "", token: str | None = None
    ) -> AsyncHttpLease:
        """Whoever takes blocks with it clears what the grant names."""
        from kvpage.client.http_lease import AsyncHttpLease  # NumPy: not for clients without leases

        call = lease_calls.create_lease(pool_id, name=name, ttl_s=ttl_s, tenant=tenant, token=token)
        opened = await self._run(call)
        proof = str(opened.token or token)
        return AsyncHttpLease(self, opened, name=name, token=proof, timeout_s=self._address.timeout_s)

    async def adopt_lease(
        self, pool_id: str, *, name: str, token: str, ttl_s: float = 30.0, generation: int | None = None
    ) -> AsyncHttpLease:
        from kvpage.client.http_lease import AsyncHttpLease

        call = lease_calls.adopt_lease(pool_id, name=name, token=token, ttl_s=ttl_s, generation=generation)
        opened = await self._run(call)
        return AsyncHttpLease(self, opened, name=name, token=token, timeout_s=self._address.timeout_s)

    async def leases(self, pool_id: str) -> list[LeaseState]:
        return await self._run(lease_calls.leases(pool_id))

    async def block_map(self, pool_id: str, *, max_cells: int = 1024) -> BlockMap:
        return await self._run(lease_calls.block_map(pool_id, max_cells))

    async def tenants(self, pool_id: str) -> list[TenantState]:
        return await self._run(lease_calls.tenants(pool_id))

    async def set_tenant(
        self, pool_id: str, name: str, *, quota_bytes: int | None = None, priority: int = 0, weight: int = 1
    ) -> TenantState:
        call = lease_calls.set_tenant(pool_id, name, quota_bytes=quota_bytes, priority=priority, weight=weight)
        return await self._run(call)

    async def clear_prefixes(self, pool_id: str) -> None:
        await self._run(lease_calls.clear_prefixes(pool_id))

    async def contents(self, pool_id: str, group: int, *, page_token: str | None = None) -> ContentsPage:
        return await self._run(lease_calls.contents(pool_id, group, page_token))

    async def events(
        self,
        pool_id: str | None = None,
        *,
        after: str | None = None,
        on_loss: Callable[[KvpageError], None] | None = None,
    ) -> AsyncIterator[Event]:
        """For `async for`."""
        reading = EventReading(pool_id, after, self._address.timeout_s, on_loss)
        while not reading.is_over:
            try:
                async for event in self._events(reading):
                    yield event
            except KvpageError as error:
                await asyncio.sleep(reading.pause_s(error))

    async def _events(self, reading: EventReading) -> AsyncIterator[Event]:
        check_usable(self._pid, closed=self.closed)
        request = reading.begin()
        timeout = self._address.timeout(request)
        try:
            async with self._http.stream(
                request.method, request.path, params=request.query, headers=request.all_headers, timeout=timeout
            ) as response:
                async for part in response.aiter_bytes():
                    for event in reading.feed(response.status_code, part):
                        yield event
        except httpx.RequestError as error:
            raise self._address.unreachable(error) from error
        reading.end(response.status_code)

    async def devices(self) -> list[Device]:
        return await self._run(calls.devices())

    async def health(self) -> Health:
        return await self._run(calls.health())

    async def _run(self, call: Call[_Result]) -> _Result:
        try:
            request = next(call)
            while True:
                request = call.send(await self._send(request))
        except StopIteration as done:
            result: _Result = done.value
            return result

    async def _send(self, request: Request) -> Answer:
        check_usable(self._pid, closed=self.closed)
        collected = Collected()
        try:
            async with self._http.stream(
                request.method,
                request.path,
                content=request.body,
                params=request.query,
                headers=request.all_headers,
                timeout=self._address.timeout(request),
            ) as response:
                async for part in response.aiter_bytes():
                    collected.add(part)
        except httpx.RequestError as error:
            raise self._address.unreachable(error) from error
        return Answer(status=response.status_code, content=collected.content)
