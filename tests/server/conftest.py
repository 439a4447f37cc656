"""The API in this process without a worker, and as a real server with one."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from kvpage_server.app import create_app
from support.api_in_process import in_process, settings_without_worker
from support.api_service import ApiService
from support.leaks import leak_guard


@pytest.fixture
async def api(run_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Called as by a peer of the Unix socket; its one device has no worker."""
    async with in_process(create_app(settings_without_worker(run_dir))) as client:
        yield client


@pytest.fixture
async def api_over_tcp(run_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The same, called over TCP by nobody in particular."""
    async with in_process(create_app(settings_without_worker(run_dir)), caller=None) as client:
        yield client


@pytest.fixture(scope="module")
def shared_service() -> Iterator[ApiService]:
    """One real server and worker for all tests of a file, which leave no pool behind."""
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--port", "0", "--memory", "64MiB") as service:
            yield service


@pytest.fixture
def service(no_leaks: None, run_dir: Path) -> Iterator[ApiService]:
    """A real server and its worker, with a TCP port and without a token."""
    with ApiService(run_dir, "--port", "0", "--memory", "64MiB") as service:
        yield service
