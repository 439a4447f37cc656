"""What every error answer has in common."""

from __future__ import annotations

from typing import Any

import httpx

from kvpage.errors import ERRORS_BY_CODE

PROBLEM_JSON = "application/problem+json"
REQUIRED = {"type", "title", "status", "code", "detail", "retryable", "request_id"}


def assert_problem(response: httpx.Response, code: str) -> dict[str, Any]:
    """`response` is the problem for `code`, whole and consistent; its body."""
    body: dict[str, Any] = response.json()
    kind = ERRORS_BY_CODE[code]
    assert response.headers["content-type"] == PROBLEM_JSON
    assert body["code"] == code, body
    assert body.keys() >= REQUIRED
    assert (body["status"], response.status_code) == (kind.http_status, kind.http_status)
    assert body["type"] == f"/errors#{code}"
    assert body["retryable"] is kind.retryable
    assert ("retry-after" in response.headers) == kind.retryable
    assert body["request_id"] == response.headers["x-request-id"]
    return body
