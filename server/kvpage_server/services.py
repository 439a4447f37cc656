"""Everything the routes use, made by the lifespan and found from a request."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from kvpage_server.event_stream import EventStreams
from kvpage_server.fleet_service import FleetService
from kvpage_server.http_leases import HttpLeases
from kvpage_server.metrics import Metrics
from kvpage_server.planning import PlanService
from kvpage_server.settings import Settings
from kvpage_server.supervisor import Supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    settings: Settings
    plans: PlanService
    pools: Supervisor
    leases: HttpLeases
    events: EventStreams
    fleet: FleetService
    metrics: Metrics


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
