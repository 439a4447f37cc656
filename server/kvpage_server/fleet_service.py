"""The fleet as the routes use it. Ray is imported, and asked, in threads of this module only, and only with --fleet."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TypeVar

from kvpage.client.fleet_resources import FleetEvent
from kvpage.errors import DeviceUnavailable, KvpageError, NotSupported, how_to_install
from kvpage.fleet.manager import FleetManager, Watch

THREADS = 4
"""Requests about the fleet that are served at once; one that makes a plan waits for memory on all its nodes."""
WATCH_INTERVAL_S = 1.0
CONNECT_AGAIN_S = 5.0

Joined = Callable[[], FleetManager]
"""Joins the cluster, which takes seconds. Raises `KvpageError`."""
_Result = TypeVar("_Result")
logger = logging.getLogger("kvpage.fleet")


class FleetService:
    """Used from the event loop; `start` and `close` too."""

    def __init__(self, join: Joined | None) -> None:
        """None: there is no fleet."""
        self._join = join
        self._manager: FleetManager | None = None
        self._watch: Watch | None = None
        self._detail = "it is being joined"
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvpage-fleet")
        self._joining: asyncio.Future[None] | None = None

    def start(self) -> None:
        if self._join is not None:
            self._joining = asyncio.get_running_loop().run_in_executor(None, self._join_and_watch, self._join)

    async def close(self) -> None:
        """What was begun is not undone: it lies with the nodes."""
        self._closed.set()
        if self._joining is not None:
            await self._joining
        if self._watch is not None:
            await asyncio.to_thread(self._watch.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[FleetManager], _Result]) -> _Result:
        """`work` in a thread. Raises `NotSupported` where there is no fleet, `DeviceUnavailable` until it is joined."""
        if self._join is None:
            raise NotSupported("this server is of no fleet; start it with --fleet ADDRESS (docs/fleet.md)")
        manager = self._manager
        if manager is None:
            raise DeviceUnavailable(f"the fleet cannot be asked yet: {self._detail}")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, manager)

    def _join_and_watch(self, join: Joined) -> None:
        while not self._closed.is_set():
            try:
                self._manager = join()
            except KvpageError as error:
                self._detail = error.message
                logger.warning("no fleet yet", extra={"detail": error.message})
                self._closed.wait(CONNECT_AGAIN_S)
                continue
            self._watch = Watch(self._manager, interval_s=WATCH_INTERVAL_S, on_event=_log)
            return


def joined(address: str | None) -> Joined | None:
    """For the Ray cluster at `address`; None without one. Raises `NotSupported` when Ray is not installed."""
    if address is None:
        return None
    if find_spec("ray") is None:
        raise NotSupported(f"--fleet needs Ray: {how_to_install('fleet')}")

    def join() -> FleetManager:
        from kvpage.fleet import ray_cluster

        ray_cluster.connect(address)
        return FleetManager(ray_cluster.RayTransport(), new_id=ray_cluster.new_id)

    return join


def _log(event: FleetEvent) -> None:
    level = logging.INFO if event.after == "ready" else logging.WARNING
    details = {"kind": event.kind, "subject": event.subject, "before": event.before, "after": event.after}
    logger.log(level, "fleet changed", extra=details)
