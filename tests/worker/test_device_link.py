"""The server's connection to a worker: what ends it, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpage.errors import TooLarge
from kvpage_server.device_link import DeviceLink, WorkerThreads
from support.api_in_process import settings_without_worker
from support.worker_process import WorkerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


class Owner:
    """Whose ticks fail at first."""

    def __init__(self) -> None:
        self.num_connected = 0
        self.num_ticks = 0
        self.ticked_on = asyncio.Event()

    async def connected(self, *, is_new_worker: bool) -> None:
        self.num_connected += 1

    async def tick(self) -> None:
        self.num_ticks += 1
        if self.num_ticks < 3:
            raise TooLarge("the reply has more bytes than a frame")
        self.ticked_on.set()


@contextlib.asynccontextmanager
async def linked(run_dir: Path, owner: Owner) -> AsyncIterator[DeviceLink]:
    threads = WorkerThreads()
    link = DeviceLink("host", settings_without_worker(run_dir), threads, owner, tick_s=0.01)
    running = asyncio.ensure_future(link.run())
    try:
        await link.wait_ready(60)
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await link.stop()
        await asyncio.to_thread(threads.shutdown)


async def test_an_error_in_answer_to_one_request_does_not_lose_the_worker(worker: WorkerProcess, run_dir: Path) -> None:
    owner = Owner()
    async with linked(run_dir, owner) as link:
        await asyncio.wait_for(owner.ticked_on.wait(), 60)
        assert link.is_ready
        assert owner.num_connected == 1
