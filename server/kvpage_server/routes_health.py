"""Probes, the page of errors, and nothing that asks a worker."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, Response

from kvpage.client.resources import Health, HealthStatus
from kvpage_server import openapi
from kvpage_server.error_guide import as_html
from kvpage_server.services import services_of


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/livez", get_livez, methods=["GET"], operation_id="livez", summary="Whether the process answers",
        responses=openapi.LIVE_ANSWERS,
    )  # fmt: skip
    for path, operation in (("/readyz", "readyz"), ("/health", "health")):
        app.add_api_route(
            path, get_readyz, methods=["GET"], operation_id=operation, summary="Whether requests can be served",
            openapi_extra=openapi.VERBOSE_PARAMETER, responses=openapi.READY_ANSWERS,
        )  # fmt: skip
    app.add_api_route(
        "/errors", get_errors, methods=["GET"], operation_id="errors", summary="What every error code means",
        response_class=HTMLResponse, responses=openapi.ERRORS_ANSWERS,
    )  # fmt: skip


async def get_livez(request: Request) -> Response:
    return _health(Health(status="ok"), 200)


async def get_readyz(request: Request) -> Response:
    """`?verbose` names every check."""
    pools = services_of(request).pools
    checks = pools.checks()
    is_ready = all(check.ok for check in checks)
    shown = checks if "verbose" in request.query_params else []
    status: HealthStatus = "ready" if is_ready else "draining" if pools.is_draining else "not-ready"
    return _health(Health(status=status, checks=shown), 200 if is_ready else 503)


async def get_errors(request: Request) -> Response:
    return HTMLResponse(as_html())


def _health(health: Health, status: int) -> Response:
    return Response(msgspec.json.encode(health), status, {"Cache-Control": "no-store"}, "application/json")
