"""What the service counts: what its workers say when they are asked, and what this process did itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage._version import __version__
from kvpage.plans import Plan
from kvpage_server.device_pools import DevicePools
from kvpage_server.metrics_reading import DeviceReader, DeviceReading
from kvpage_server.metrics_state import StateMetrics
from kvpage_server.planning import Planner
from kvpage_server.problems import error_code_of

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PLANS = "/v1/plans"
_HTTP_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PLAN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ServiceMetrics:
    """Of this process. Counters begin at 0 with it."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each that nobody asks for
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kvpage_http_requests", "Requests that were answered", ["method", "route", "status"], registry=self.registry
        )
        self._errors = Counter(
            "kvpage_http_errors", "Answers that are errors, by their code", ["code", "route"], registry=self.registry
        )
        self._durations = Histogram(
            "kvpage_http_request_duration_seconds",
            "From a request to the beginning of its answer",
            ["route"],
            buckets=_HTTP_BOUNDS_S,
            registry=self.registry,
        )
        self._plans = Histogram(
            "kvpage_plan_duration_seconds",
            "How long a plan of one rank took that was not in the cache",
            buckets=_PLAN_BOUNDS_S,
            registry=self.registry,
        )
        build = Gauge("kvpage_build_info", "1; which version this is", ["version"], registry=self.registry)
        build.labels(version=__version__).set(1)

    def timed(self, planner: Planner) -> Planner:
        """The same, and it is measured how long it takes. Runs in any thread."""

        def plan(request: Any) -> Plan:
            with self._plans.time():
                return planner(request)

        return plan

    def answered(self, scope: Scope, status: int, duration_s: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        route = _route_of(scope, status)
        self._requests.labels(method, route, str(status)).inc()
        self._durations.labels(route).observe(duration_s)
        code = error_code_of(scope)
        if code is not None:
            self._errors.labels(code, route).inc()


class CountRequests:
    """The outermost middleware. An answer counts when it begins: some go on for as long as a client holds a pool."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        since_s = time.perf_counter()

        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(scope, message["status"], time.perf_counter() - since_s)
            await send(message)

        await self.app(scope, receive, send_and_count)


class Metrics:
    """Everything that `GET /metrics` says. Lives on the event loop; `close()` stops asking workers."""

    def __init__(self, service: ServiceMetrics, devices: Iterable[DevicePools]) -> None:
        self._service = service
        self._readers = [DeviceReader(pools) for pools in devices]
        self._state = StateMetrics()
        self._rendering = asyncio.Lock()

    async def close(self) -> None:
        await asyncio.gather(*(reader.close() for reader in self._readers))

    async def text(self) -> bytes:
        """In Prometheus' text format. Takes no longer than a worker may take to answer, and the writing."""
        readings = await asyncio.gather(*(reader.read() for reader in self._readers))
        async with self._rendering:  # one thread, however many ask
            return await asyncio.to_thread(self._written, readings)

    def _written(self, readings: Sequence[DeviceReading]) -> bytes:
        return as_text(self._state.families(readings)) + generate_latest(self._service.registry)


class _Once(Collector):
    """Metrics that were made to be written once."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def as_text(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Once(families))
    return generate_latest(registry)


def _route_of(scope: Scope, status: int) -> str:
    """The path as the description of the API has it, so that there are not more of them than routes."""
    route = scope.get("route")
    if route is not None:
        return str(route.path)
    if status == 200 and scope["path"].startswith(_PLANS):  # answered from the cache, before routing
        return _PLANS if scope["path"] == _PLANS else _PLANS + "/{plan_id}"
    return "none"
