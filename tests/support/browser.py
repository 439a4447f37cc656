"""A real Chromium, and what a page did in it: errors, words on the console, addresses it asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_MS = 30_000
"""On a machine that has much else to do; what is waited for comes in a moment on others."""
_REFUSED = "Failed to load resource: the server responded with a status of 4"
"""What Chromium itself writes for an answer that is a problem; a page cannot keep it from doing so."""


def executable() -> str:
    """Skips where there is no Chromium: none comes with the tests."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH (Debian: apt install chromium)")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """With a fresh profile. As root it takes no sandbox."""
    path = executable()
    expect.set_options(timeout=PATIENCE_MS)
    arguments = [*ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """What a page does that it must not."""

    def __init__(self, page: Page, origin: str, allowed: tuple[str, ...]) -> None:
        """`allowed`: parts of what the console may say, because the test makes it do so."""
        self.faults: list[str] = []
        self.urls: list[str] = []
        self._origin, self._allowed = origin, (_REFUSED, *allowed)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._said)
        page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in self._allowed):
            self.faults.append(f"console: {message.text}")

    def _asked(self, request: Request) -> None:
        self.urls.append(request.url)
        if not request.url.startswith((self._origin + "/", f"blob:{self._origin}/")):
            self.faults.append(f"asked elsewhere: {request.url}")


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def focused(page: Page) -> dict[str, Any]:
    """What has the focus, and how it shows."""
    told: dict[str, Any] = page.evaluate(
        """() => {
            const element = document.activeElement, style = getComputedStyle(element);
            const shown = element.matches('.choices input') ? getComputedStyle(element.nextElementSibling) : style;
            return {
                id: element.id || element.dataset.strategy || element.dataset.pool || element.value
                    || element.textContent.trim().slice(0, 40),
                tag: element.tagName, outline: shown.outlineStyle, width: parseFloat(shown.outlineWidth),
            };
        }"""
    )
    return told
