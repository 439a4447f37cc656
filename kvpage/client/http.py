"""The API process from Python: plans, pools, devices and health over its Unix socket or a URL."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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
from kvpage.client.unix_transport import UnixTransport
from kvpage.errors import KvpageError
from kvpage.plans import Plan
from kvpage.ranked_plan import RankedPlan

if TYPE_CHECKING:
    from kvpage.client.http_lease import HttpLease
    from kvpage.pages.block_lease import Clear

_Result = TypeVar("_Result")


class Client:
    """A connection to a kvpage server; methods may be called from several threads. `close()` it, or use `with`.

    Every problem the server reports is raised as the `KvpageError` it names, with its `details` and `errors`. When no
    server answers, `DeviceUnavailable` says how to start one.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        run_dir: str | None = None,
        token: str | None = None,
        ca_file: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`url`: such as `http://127.0.0.1:8080`; default the socket in the run directory, see `RunDirectory.default`.

        `token`: a bearer token, for a URL. `ca_file`: authorities (PEM) whose certificate an https server must show.
        `timeout_s`: for connecting and for each answer, waiting not counted. `transport`: what carries requests, for
        tests and for TLS of one's own, such as with a client's certificate.
        """
        address = self._address = Address.of(url, run_dir, token, timeout_s)
        self._pid = os.getpid()
        if transport is None and address.socket_path is not None:
            transport = UnixTransport(address.socket_path)
        self._http = httpx.Client(
            base_url=address.url,
            headers=address.headers,
            timeout=timeout_s,
            transport=transport,
            trust_env=False,
            verify=server_trust(ca_file),
        )

    def __repr__(self) -> str:
        return f"<kvpage.Client {self._address.place} {'closed' if self.closed else 'open'}>"

    @property
    def closed(self) -> bool:
        return self._http.is_closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        self._http.close()

    # --- plans -------------------------------------------------------------------------------------------------------

    def plan(self, request: object) -> Plan:
        """The server's plan for `request`, a mapping or a `PlanRequest`. Raises `SpecInvalid` with pointers into it."""
        return self._run(calls.plan(request))

    def plan_ranks(self, request: object) -> RankedPlan:
        """The server's plans for all ranks of `request`, as `kvpage.plan_ranks` makes them."""
        return self._run(calls.plan_ranks(request))

    def get_plan(self, plan_id: str) -> Plan:
        """Raises `PlanNotFound` when the server has forgotten it; `plan` its request again then."""
        return self._run(calls.get_plan(plan_id))

    def layout_svg(self, plan_id: str) -> str:
        """The plan as an SVG document: pages, padding, slabs and strides to scale. Raises `PlanNotFound`."""
        return self._run(calls.layout_svg(plan_id))

    # --- pools -------------------------------------------------------------------------------------------------------

    def create_pool(
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
        """Make a pool of the plan for `request`, or find the one of this name and plan.

        Waits up to `wait_s` for its memory; after that the pool's `state` is still `creating`, and `get_pool` tells
        more. `rank`: whose plan, where the request has several. `plan_id`: refuse any other plan. `handle_kind`: how
        its memory is shared, if not as is best on the device (`cuda_ipc`). Raises `Conflict` (another plan under this
        name or than expected), `NotEnoughMemory`, `SpecInvalid`, `DeviceUnavailable`.
        """
        return self._run(
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

    def pools(self) -> list[Pool]:
        return self._run(calls.pools())

    def get_pool(self, pool_id: str, *, wait_s: float = 0.0) -> Pool:
        """Waits up to `wait_s` (at most `calls.MAX_WAIT_S`) while the pool is creating or deleting.

        Raises `PoolNotFound`.
        """
        return self._run(calls.get_pool(pool_id, wait_s=wait_s))

    def find_pool(self, name: str, device: str | None = None) -> Pool:
        """The pool of that name. Raises `PoolNotFound`, or `Conflict` when several devices have one."""
        return self._run(calls.find_pool(name, device))

    def delete_pool(self, pool_id: str, *, wait_s: float = 0.0, force: bool = False) -> ForgottenPool | None:
        """Give the memory back, once those who hold the pool have let go within `wait_s`.

        Raises `Conflict` naming those who have not, `PoolNotFound`. With `force` the pool is forgotten then: the answer
        says what stays in use and until which processes let go; None when the memory has been given back.
        """
        return self._run(calls.delete_pool(pool_id, wait_s=wait_s, force=force))

    def pool_tensors(self, pool_id: str) -> PoolTensors:
        """Shape, byte strides and offset of every tensor in the pool's buffer."""
        return self._run(calls.pool_tensors(pool_id))

    # --- fleets ------------------------------------------------------------------------------------------------------

    def fleet(self) -> Fleet:
        """Nodes and plans of the fleet that this server is the head of. Raises `NotSupported` where there is none."""
        return self._run(fleet_calls.fleet())

    def create_fleet_plan(
        self, request: object, *, name: str, places: list[Place] | None = None, wait_s: float = 600.0
    ) -> FleetPlan:
        """Plan all ranks and reserve them on all nodes or on none; `places` of the ranks, in order, or by memory."""
        return self._run(fleet_calls.create_fleet_plan(request, name=name, places=places, wait_s=wait_s))

    def get_fleet_plan(self, plan_id: str) -> FleetPlan:
        """By id or name. Raises `NotFound`."""
        return self._run(fleet_calls.get_fleet_plan(plan_id))

    def delete_fleet_plan(self, plan_id: str, *, force: bool = False) -> FleetPlan | None:
        """None when it is gone on all nodes, else what is left. Raises `Conflict` naming who holds it."""
        return self._run(fleet_calls.delete_fleet_plan(plan_id, force=force))

    # --- leases, tenants and contents --------------------------------------------------------------------------------

    def create_lease(
        self,
        pool_id: str,
        *,
        name: str,
        ttl_s: float = 30.0,
        tenant: str = "",
        token: str | None = None,
        clear: Clear | None = None,
    ) -> HttpLease:
        """A lease without blocks on a pool, on the terms of `tenant`.

        It ends when nothing is asked of it for `ttl_s` (at most 60); `renew` it in time. `token`: what proves, to
        `adopt_lease`, that one may (None: the server makes one); with one of your own you can adopt the lease also when
        no answer came. `clear`: writes zeros into blocks that must be cleared before they are used.

        Raises `Conflict` where the name is taken, `NotSupported` where the pool's blocks cannot be leased,
        `PoolNotFound`, `SpecInvalid`, `TooManyClients`, `DeviceUnavailable`.
        """
        from kvpage.client.http_lease import HttpLease  # NumPy: not for clients without leases

        call = lease_calls.create_lease(pool_id, name=name, ttl_s=ttl_s, tenant=tenant, token=token)
        opened = self._run(call)
        proof = str(opened.token or token)
        return HttpLease(self, opened, name=name, token=proof, clear=clear, timeout_s=self._address.timeout_s)

    def adopt_lease(
        self,
        pool_id: str,
        *,
        name: str,
        token: str,
        ttl_s: float = 30.0,
        generation: int | None = None,
        clear: Clear | None = None,
    ) -> HttpLease:
        """The lease of this name with all its blocks (`HttpLease.held`), from an owner that is there or not: that one
        can do nothing with it any more. `generation`: refuse a lease that has had another owner since this one.

        Raises as `create_lease`; `NotFound` where there is no such lease, `PermissionDenied` for a wrong token.
        """
        from kvpage.client.http_lease import HttpLease

        call = lease_calls.adopt_lease(pool_id, name=name, token=token, ttl_s=ttl_s, generation=generation)
        opened = self._run(call)
        return HttpLease(self, opened, name=name, token=token, clear=clear, timeout_s=self._address.timeout_s)

    def leases(self, pool_id: str) -> list[LeaseState]:
        """The first 64 of the pool, without their ids and tokens."""
        return self._run(lease_calls.leases(pool_id))

    def block_map(self, pool_id: str, *, max_cells: int = 1024) -> BlockMap:
        """All blocks of the pool, drawn together to at most so many cells (1 to 4,096)."""
        return self._run(lease_calls.block_map(pool_id, max_cells))

    def tenants(self, pool_id: str) -> list[TenantState]:
        """Those with settings, and those that have leases."""
        return self._run(lease_calls.tenants(pool_id))

    def set_tenant(
        self, pool_id: str, name: str, *, quota_bytes: int | None = None, priority: int = 0, weight: int = 1
    ) -> TenantState:
        """Instead of the settings before. `quota_bytes`: most bytes of blocks that its leases may hold; the higher
        `priority` (-100 to 100) is served strictly before the lower; `weight` (1 to 1,000) is the share among those of
        the same priority. `name`: empty for the tenant of those who name none.
        """
        return self._run(
            lease_calls.set_tenant(pool_id, name, quota_bytes=quota_bytes, priority=priority, weight=weight)
        )

    def clear_prefixes(self, pool_id: str) -> None:
        """Forget every cached prefix of the pool, because the weights have changed."""
        self._run(lease_calls.clear_prefixes(pool_id))

    def contents(self, pool_id: str, group: int, *, page_token: str | None = None) -> ContentsPage:
        """What the cached blocks of a group hold, in pages; `events` go on from its `cursor`.

        Raises `StaleHandle` when the worker was replaced since the page before: list from the beginning then.
        """
        return self._run(lease_calls.contents(pool_id, group, page_token))

    def events(
        self,
        pool_id: str | None = None,
        *,
        after: str | None = None,
        on_loss: Callable[[KvpageError], None] | None = None,
    ) -> Iterator[Event]:
        """Contents that come and go and states of pools, of one pool (until it is gone) or all, without end.

        `after`: the `id` of an event, or the `cursor` of a list of contents; None: from now on. Goes on by itself when
        the server is replaced, having told `on_loss` the reason; raises `DeviceUnavailable` when there is none for
        `timeout_s`, `PoolNotFound`, `RateLimited` when too many read.
        """
        reading = EventReading(pool_id, after, self._address.timeout_s, on_loss)
        while not reading.is_over:
            try:
                yield from self._events(reading)
            except KvpageError as error:
                time.sleep(reading.pause_s(error))

    def _events(self, reading: EventReading) -> Iterator[Event]:
        """Those of one answer."""
        check_usable(self._pid, closed=self.closed)
        request = reading.begin()
        timeout = self._address.timeout(request)
        try:
            with self._http.stream(
                request.method, request.path, params=request.query, headers=request.all_headers, timeout=timeout
            ) as response:
                for part in response.iter_bytes():
                    yield from reading.feed(response.status_code, part)
        except httpx.RequestError as error:
            raise self._address.unreachable(error) from error
        reading.end(response.status_code)

    # --- the server --------------------------------------------------------------------------------------------------

    def devices(self) -> list[Device]:
        return self._run(calls.devices())

    def health(self) -> Health:
        """Named checks and the status they add up to. A server that is not ready is an answer, not an error."""
        return self._run(calls.health())

    # --- carrying requests -------------------------------------------------------------------------------------------

    def _run(self, call: Call[_Result]) -> _Result:
        try:
            request = next(call)
            while True:
                request = call.send(self._send(request))
        except StopIteration as done:
            result: _Result = done.value
            return result

    def _send(self, request: Request) -> Answer:
        check_usable(self._pid, closed=self.closed)
        collected = Collected()
        try:
            with self._http.stream(
                request.method,
                request.path,
                content=request.body,
                params=request.query,
                headers=request.all_headers,
                timeout=self._address.timeout(request),
            ) as response:
                for part in response.iter_bytes():
                    collected.add(part)
        except httpx.RequestError as error:
            raise self._address.unreachable(error) from error
        return Answer(status=response.status_code, content=collected.content)
