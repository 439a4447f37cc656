"""Take the picture of the web page for the documents: `python scripts/draw_ui.py`.

Starts a service of its own, opens /ui in the machine's Chromium (extra `dev`), and writes docs/img/ui.png. A browser
draws text as its fonts have it, so the picture differs from machine to machine: no test compares it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from kvpage.cli.demo_page import free_port
from kvpage.cli.demo_service import run_directory, service
from kvpage.cli.ending import Ending

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "img" / "ui.png"
FRAGMENT = "#example=qwen3-next-80b-a3b&tp=2&memory=60"
SIZE = {"width": 1440, "height": 1150}
MAX_BYTES = 250_000


def draw(origin: str) -> bytes:
    """PNG of the plan view."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("there is no Chromium on the PATH (Debian: apt install chromium)")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--headless", "--disable-gpu", *sandbox])
        page = browser.new_page(viewport=SIZE, color_scheme="light")  # type: ignore[arg-type]
        page.goto(f"{origin}/ui{FRAGMENT}")
        page.locator("#compare[data-of]").wait_for()
        return page.screenshot()


def main() -> None:
    ending, port = Ending(), free_port()
    ending.begin()
    with run_directory(None) as run_dir, service(run_dir, "host", ending, "--port", str(port)):
        picture = draw(f"http://127.0.0.1:{port}")
    if len(picture) > MAX_BYTES:
        sys.exit(f"the picture has {len(picture):,} bytes, more than {MAX_BYTES:,}; make it smaller")
    PICTURE.write_bytes(picture)
    print(f"{PICTURE}: {len(picture):,} bytes")


if __name__ == "__main__":
    main()
