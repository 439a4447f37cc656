"""`Client` for programs that run an event loop: the same methods, to be awaited."""

from __future__ import annotations

import os
from typing import Self, TypeVar

import httpx

from kvpage.client import calls
from kvpage.client.address import DEFAULT_TIMEOUT_S, Address, check_usable
from kvpage.client.calls import Answer, Call, Collected, Request
from kvpage.client.resources import Device, ForgottenPool, Health, Pool, PoolTensors
from kvpage.client.unix_transport import AsyncUnixTransport
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan

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
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """As `Client`."""
        address = self._address = Address.of(url, run_dir, token, timeout_s)
        self._pid = os.getpid()
        if transport is None and address.socket_path is not None:
            transport = AsyncUnixTransport(address.socket_path)
        self._http = httpx.AsyncClient(
            base_url=address.url, headers=address.headers, timeout=timeout_s, transport=transport, trust_env=False
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
