"""The ASGI application: what is made at start-up, closed at shutdown, and replaceable in tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from kvpage._version import __version__
from kvpage.planner.planner import plan as plan_request
from kvpage_server import (
    openapi,
    routes_events,
    routes_fleet,
    routes_health,
    routes_hold,
    routes_lease_blocks,
    routes_leases,
    routes_metrics,
    routes_plans,
    routes_pools,
    routes_tenants,
    routes_ui,
)
from kvpage_server.access import AccessPolicy, own_uid
from kvpage_server.audit import Audit
from kvpage_server.audit_log import AuditLog
from kvpage_server.cached_plans import CachedPlans
from kvpage_server.event_stream import EventStreams
from kvpage_server.farewell import say_farewell
from kvpage_server.fleet_service import FleetService, Joined, joined
from kvpage_server.guard import Guard
from kvpage_server.http_leases import HttpLeases
from kvpage_server.metrics import CountRequests, Metrics, ServiceMetrics
from kvpage_server.operations import Operations
from kvpage_server.plan_cache import PlanCache
from kvpage_server.planning import Planner, PlanService
from kvpage_server.problems import install_handlers
from kvpage_server.rate_limit import ChangeLimit
from kvpage_server.request_id import RequestIdMiddleware
from kvpage_server.services import Services
from kvpage_server.settings import Settings
from kvpage_server.supervisor import Supervisor
from kvpage_server.tokens import MAX_TOKENS, TokenFile

logger = logging.getLogger("kvpage.api")
_ROUTES = (
    routes_plans,
    routes_pools,
    routes_hold,
    routes_leases,
    routes_lease_blocks,
    routes_tenants,
    routes_events,
    routes_fleet,
    routes_health,
    routes_metrics,
    routes_ui,
)
_DESCRIPTION = "Plans KV-cache page layouts and holds the memory for them. Errors are RFC 9457 problems; see /errors."


def create_app(
    settings: Settings,
    *,
    planner: Planner = plan_request,
    access: AccessPolicy | None = None,
    on_shutdown: Callable[[], None] = lambda: None,
    join_fleet: Joined | None = None,
) -> FastAPI:
    """The application for `settings`. Nothing is started before its lifespan begins.

    `access`: default from the settings. `on_shutdown`: runs last, when nothing is served any more. `join_fleet`:
    default the Ray cluster of the settings, if they name one.
    """
    counted, joining = ServiceMetrics(), join_fleet or joined(settings.fleet)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(on_shutdown)
            app.state.audit = _audit(settings, stack)
            plans = PlanService(counted.timed(planner), PlanCache(settings.plan_cache_bytes))
            stack.callback(plans.close)
            supervisor = Supervisor(settings)
            metrics = Metrics(counted, supervisor.each)
            fleet = FleetService(joining)
            app.state.services = _services(settings, plans, supervisor, metrics, fleet)
            supervisor.start()
            fleet.start()
            announcing = asyncio.ensure_future(_announce(supervisor, settings.ready_fd))
            try:
                yield
            finally:
                announcing.cancel()
                await fleet.close()
                await say_farewell(supervisor, settings)
                await metrics.close()
                await supervisor.stop()

    app = Application(
        access=access or policy_of(settings),
        limit=ChangeLimit(settings.rate_limit_per_s, max_tokens=MAX_TOKENS),
        counted=counted,
        lifespan=lifespan,
    )
    for routes in _ROUTES:
        routes.add_routes(app)
    openapi.install(app)
    install_handlers(app)
    app.operations = Operations(app.routes)
    return app


class Application(FastAPI):
    """A request is counted, gets an id and is checked for access, and plans in the cache are answered, before the
    framework looks at it: passing through its layers costs more than all of that.
    """

    operations: Operations
    """Of all routes; there when they are."""

    def __init__(self, *, access: AccessPolicy, limit: ChangeLimit, counted: ServiceMetrics, **options: Any) -> None:
        super().__init__(
            title="kvpage",
            version=__version__,
            description=_DESCRIPTION,
            docs_url=None,  # both pages load scripts from a content network, which a server on a closed network has not
            redoc_url=None,
            redirect_slashes=False,
            **options,
        )
        cached = CachedPlans(super().__call__, plans=lambda: self.state.services.plans)
        guard = Guard(
            cached,
            policy=access,
            limit=limit,
            operations=lambda: self.operations,
            audit=lambda: getattr(self.state, "audit", None),
        )
        self._front = CountRequests(RequestIdMiddleware(guard), counted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)


def _services(
    settings: Settings, plans: PlanService, supervisor: Supervisor, metrics: Metrics, fleet: FleetService
) -> Services:
    return Services(
        settings=settings,
        plans=plans,
        pools=supervisor,
        leases=HttpLeases(supervisor),
        events=EventStreams(supervisor),
        metrics=metrics,
        fleet=fleet,
    )


def _audit(settings: Settings, stack: contextlib.ExitStack) -> Audit | None:
    """Closed with the stack: the last records are of requests that end with the server."""
    if settings.audit_log is None:
        return None
    log = AuditLog(settings.audit_log)
    stack.callback(log.close)
    return Audit(log)


async def _announce(supervisor: Supervisor, ready_fd: int | None) -> None:
    """Tell whoever started the server that it is ready, once."""
    await supervisor.wait_ready()
    logger.info("ready")
    if ready_fd is not None:
        with contextlib.suppress(OSError):  # who asked may be gone; that is no reason to end
            os.write(ready_fd, b"ready\n")
        os.close(ready_fd)


def policy_of(settings: Settings) -> AccessPolicy:
    """Raises `SpecInvalid` when the token file cannot be used."""
    tokens = None if settings.token_file is None else TokenFile(settings.token_file)
    return AccessPolicy(server_uid=own_uid(), group_gid=settings.group_gid, tokens=tokens)
