"""The server's connection to a worker: what ends it, and what does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpage.errors import TooLarge
from kvpage.wire import messages
from kvpage_server.device_link import DeviceLink
from kvpage_server.worker_threads import WorkerThreads
from support.api_in_process import settings_without_worker
from support.worker_process import WorkerProcess

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


class Owner:
    """Whose first ticks fail."""

    def __init__(self, num_failing: int = 0) -> None:
        self.num_failing = num_failing
        self.num_connected = 0
        self.num_ticks = 0
        self.ticked_on = asyncio.Event()
        """Set by each tick that does not fail."""

    async def connected(self, *, is_new_worker: bool) -> None:
        self.num_connected += 1

    async def tick(self) -> None:
        self.num_ticks += 1
        if self.num_ticks <= self.num_failing:
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
    owner = Owner(num_failing=2)
    async with linked(run_dir, owner) as link:
        await asyncio.wait_for(owner.ticked_on.wait(), 60)
        assert link.is_ready
        assert owner.num_connected == 1


async def test_a_worker_that_is_replaced_is_not_lost(worker: WorkerProcess, run_dir: Path) -> None:
    """Twice in a row, as when somebody upgrades and thinks better of it: the server has an answer all along."""
    owner = Owner()
    async with linked(run_dir, owner) as link:
        asked: list[int] = []

        async def ask_all_the_time() -> None:
            while True:
                asked.append((await link.ask(messages.DescribeDevice(), messages.DeviceState)).worker_pid)

        asking = asyncio.ensure_future(ask_all_the_time())
        with (
            await asyncio.to_thread(successor, run_dir) as second,
            await asyncio.to_thread(successor, run_dir) as third,
        ):
            assert await asyncio.to_thread(second.wait) == 0
            while link.process_pid != third.pid:
                owner.ticked_on.clear()
                await asyncio.wait_for(owner.ticked_on.wait(), 60)
            assert not asking.done(), asking.result()
            asking.cancel()
            assert owner.num_connected == 1
            assert asked[0] == worker.pid
            assert asked[-1] == third.pid


def successor(run_dir: Path) -> WorkerProcess:
    return WorkerProcess(run_dir, "--replace")
