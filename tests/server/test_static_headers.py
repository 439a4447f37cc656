"""What a browser is told about the files of the web page."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from starlette.staticfiles import StaticFiles

from kvpage_server.static_headers import CONTENT_SECURITY_POLICY, STATIC_HEADERS, StaticHeaders


@pytest.mark.anyio
async def test_every_file_comes_with_the_headers(run_dir: Path) -> None:
    (run_dir / "page.html").write_text("<!doctype html>")
    files = StaticHeaders(StaticFiles(directory=run_dir))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(files)) as client:
        response = await client.get("http://kvpage/page.html")
    assert response.status_code == 200
    assert {name: response.headers.get(name) for name in STATIC_HEADERS} == STATIC_HEADERS


def test_nothing_is_loaded_from_elsewhere_and_nothing_inline_runs() -> None:
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "http" not in CONTENT_SECURITY_POLICY
    assert "*" not in CONTENT_SECURITY_POLICY
    assert "frame-ancestors 'none'" in CONTENT_SECURITY_POLICY
