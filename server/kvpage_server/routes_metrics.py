"""`/metrics`, in Prometheus' text format. It names pools and tenants, so whoever may read it may read `/v1/pools`."""

from __future__ import annotations

from fastapi import FastAPI, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from kvpage_server import openapi
from kvpage_server.queries import known_query
from kvpage_server.services import services_of


def add_routes(app: FastAPI) -> None:
    app.add_api_route(
        "/metrics", get_metrics, methods=["GET"], operation_id="metrics", summary="Metrics for Prometheus",
        response_class=PlainTextResponse, responses=openapi.METRICS_ANSWERS,
    )  # fmt: skip


async def get_metrics(request: Request) -> Response:
    """Answers within some seconds whatever state the workers are in."""
    known_query(request)
    text = await services_of(request).metrics.text()
    return Response(text, headers={"Cache-Control": "no-store", "Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
