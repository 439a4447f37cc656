"""Leases of a real server, asked for as any HTTP client would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from support.api_service import ApiService
from support.eventually import until
from support.plan_requests import small_request

NUM_BLOCKS = 67
"""Blocks that a pool of `small_request` has for its three groups together."""


@contextmanager
def http_client(service: ApiService) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(service.run_directory.api_socket))
    with httpx.Client(transport=transport, base_url="http://kvpage", timeout=60) as client:
        yield client


class Pool:
    """A pool of its own, by its path."""

    def __init__(self, http: httpx.Client, name: str = "mimo") -> None:
        self.http = http
        body = {"name": name, "request": small_request()}
        created = http.post("/v1/pools", json=body, headers={"Prefer": "wait=30"})
        assert created.status_code in (200, 201), created.text
        self.id: str = created.json()["id"]
        self.path = f"/v1/pools/{self.id}"

    def lease(self, name: str = "scheduler", **body: Any) -> Lease:
        opened = self.http.post(f"{self.path}/leases", json={"name": name, **body})
        assert opened.status_code == 201, opened.text
        return Lease(self, opened.json())

    def adopt(self, **body: Any) -> Lease:
        adopted = self.http.post(f"{self.path}/leases:adopt", json=body)
        assert adopted.status_code == 200, adopted.text
        return Lease(self, adopted.json())

    def leases(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = self.http.get(f"{self.path}/leases").json()["leases"]
        return listed

    def blocks(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.http.get(self.path).json()["blocks"]
        return shown

    def delete(self) -> None:
        """With whatever leases it has: nobody maps it."""
        assert self.http.delete(self.path, params={"force": "true"}).is_success


class Lease:
    def __init__(self, pool: Pool, opened: dict[str, Any]) -> None:
        self.pool, self.opened = pool, opened
        self.id: str = opened["lease_id"]
        self.path = f"{pool.path}/leases/{self.id}"

    def post(self, what: str, body: object = None, *, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.pool.http.post(f"{self.path}/{what}", json=body, headers=headers, **options)

    def batch(self, *, key: str | None = None, **body: Any) -> httpx.Response:
        return self.post("blocks:batch", body, key=key)

    def batch_when_possible(self, *, key: str, **body: Any) -> httpx.Response:
        """As a client does whose worker or server has just died."""

        def attempt() -> httpx.Response | None:
            try:
                answer = self.batch(key=key, **body)
            except httpx.TransportError:
                return None
            return None if answer.status_code == 503 else answer

        return until(attempt)

    def take(self, count: int, group: int = 0) -> list[int]:
        done = self.batch(allocate={str(group): count})
        assert done.status_code == 200, done.text
        ids: list[int] = done.json()["ids"][str(group)]
        return ids

    def held(self, group: int = 0) -> list[int]:
        shown = self.pool.http.get(self.path, params={"group": group})
        assert shown.status_code == 200, shown.text
        ids: list[int] = shown.json()["held"]["ids"]
        return ids
