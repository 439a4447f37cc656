"""Probes say what is wrong by name."""

from __future__ import annotations

import httpx
import pytest

pytestmark = pytest.mark.anyio


async def test_the_process_is_alive_without_a_worker(api: httpx.AsyncClient) -> None:
    response = await api.get("/livez")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/readyz", "/health"])
async def test_it_is_not_ready_without_a_worker_and_says_which(api: httpx.AsyncClient, path: str) -> None:
    brief = await api.get(path)
    assert (brief.status_code, brief.json()) == (503, {"status": "not-ready"})
    verbose = await api.get(path, params={"verbose": ""})
    checks = {check["name"]: check for check in verbose.json()["checks"]}
    assert {name: check["ok"] for name, check in checks.items()} == {
        "serving": True,
        "worker:host": False,
        "pools:host": True,
    }
    assert checks["worker:host"]["detail"]


async def test_a_device_without_a_worker_is_listed(api: httpx.AsyncClient) -> None:
    [device] = (await api.get("/v1/devices")).json()["devices"]
    assert device["device"] == "host"
    assert device["state"] in ("starting", "lost")
    assert device["worker_pid"] is None
