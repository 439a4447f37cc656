"""One service with a token and one browser for all tests of a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from support.api_service import ApiService
from support.browser import PATIENCE_MS, Watch, chromium
from support.leaks import leak_guard
from support.ui_site import TOKEN, Site


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with leak_guard(), chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def site(browser: Browser) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder, tempfile.TemporaryDirectory() as secrets:
        tokens = Path(secrets) / "tokens"
        tokens.touch(mode=0o600)
        tokens.write_text(f"read page {TOKEN}\n")
        options = ["--port", "0", "--token-file", str(tokens), "--memory", "64MiB"]
        with ApiService(Path(folder), *options) as service:
            yield Site(service, folder)


@pytest.fixture
def open_page(browser: Browser, site: Site) -> Iterator[Callable[..., Page]]:
    """Pages in profiles of their own; at the end none of them may have had an error, or asked anybody else."""
    watches: list[Watch] = []
    contexts = []

    def open_(fragment: str = "", *, allowed: tuple[str, ...] = (), **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        watches.append(Watch(page, site.origin, allowed))
        page.goto(f"{site.origin}/ui{fragment}")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [fault for watch in watches for fault in watch.faults] == []
    assert all(watch.urls for watch in watches)
