"""The connection to one device's worker: found or started, kept, and made again when the worker ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from kvpage.client.resources import DeviceStateName
from kvpage.errors import DeviceUnavailable, KvpageError, WorkerLost
from kvpage.wire import messages
from kvpage.wire.client import Reply, WorkerClient
from kvpage_server.async_worker import AsyncWorker
from kvpage_server.device_process import WatchedProcess, last_logged_line
from kvpage_server.remote_hold import RemoteHold
from kvpage_server.settings import Settings
from kvpage_server.worker_threads import WorkerThreads

logger = logging.getLogger("kvpage.api")

TICK_S = 5.0
"""How often the worker is asked for its pools; it also finds a lost worker whose process the kernel cannot name."""
END_GRACE_S = 10.0
EXTERNAL_RETRY_S = 0.25
FIRST_DELAY_S, LONGEST_DELAY_S, HEALTHY_S = 0.1, 10.0, 10.0

_Body = TypeVar("_Body", bound=messages.Body)
_Result = TypeVar("_Result")


class LinkOwner(Protocol):
    """What the link tells whoever uses it; declared here so that imports go one way."""

    async def connected(self, *, is_new_worker: bool) -> None:
        """A worker answers. Requests from outside wait until this returns."""

    async def tick(self) -> None:
        """The worker still answers."""


class RestartDelay:
    """How long to wait before the next start: twice as long after each failure, nothing after a healthy life."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def after(self, lived_s: float) -> float:
        """The delay after a worker that served for `lived_s`, 0 for one that never did."""
        if lived_s >= HEALTHY_S:
            self._next_s = 0.0
        delay_s = self._next_s
        self._next_s = min(max(2 * delay_s, FIRST_DELAY_S), LONGEST_DELAY_S)
        return delay_s


class DeviceLink:
    """Keeps one connection while `run()` runs. Lives on the event loop; the blocking client is used from threads."""

    def __init__(
        self, device: str, settings: Settings, threads: WorkerThreads, owner: LinkOwner, *, tick_s: float = TICK_S
    ) -> None:
        self.device = device
        self.state: DeviceStateName = "starting"
        self.detail = "no worker has answered yet"
        self._settings = settings
        self._threads = threads
        self._owner = owner
        self._tick_s = tick_s
        self._client: WorkerClient | None = None
        self._process: WatchedProcess | None = None
        self._served_process: WatchedProcess | None = None
        """The one that has been told about every held pool."""
        self.ready = asyncio.Event()
        """Set while a worker answers."""
        self.num_workers = 0
        """That have answered so far, one after the other."""
        self._broken = asyncio.Event()
        self._delay = RestartDelay()

    def __repr__(self) -> str:
        return f"<DeviceLink {self.device} {self.state} {self._process!r}>"

    @property
    def process_pid(self) -> int | None:
        """Of the worker; None when there is none, or the kernel cannot name it."""
        return None if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        return self.ready.is_set()

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises `DeviceUnavailable` when no worker answers within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ready.wait(), timeout_s)
        if not self.is_ready:
            raise self._unavailable()

    async def ask(self, body: messages.RequestBody, kind: type[_Body]) -> _Body:
        """Raises what the worker answers with, `WorkerLost`, or `DeviceUnavailable` when there is none that knows its
        pools: one that has just started would deny those it is still to be handed.
        """
        self._require_ready()
        return await self.ask_early(body, kind)

    async def ask_early(self, body: messages.RequestBody, kind: type[_Body], fds: Sequence[int] = ()) -> _Body:
        """Like `ask`, for the owner, who does the handing over."""
        client = self._connected_client()
        return await self._noticing_loss(client, partial(client.ask, body, kind, fds))

    async def request_early(self, body: messages.RequestBody) -> Reply:
        """Like `ask_early`, for replies with descriptors, which the caller owns."""
        client = self._connected_client()
        return await self._noticing_loss(client, partial(client.request, body))

    async def ask_after(self, first: messages.RequestBody, body: messages.RequestBody, kind: type[_Body]) -> _Body:
        """Like `ask`, when `first` has been answered, of which nothing but an error is told."""
        self._require_ready()
        client = self._connected_client()

        def ask() -> _Body:
            client.request(first)
            return client.ask(body, kind)

        return await self._noticing_loss(client, ask)

    async def open_apart(self) -> AsyncWorker:
        """A connection of its own, which the caller closes, for one who waits long. Raises as `ask` does."""
        self._require_ready()
        return await AsyncWorker.open(self._settings.run_directory.worker_socket(self.device))

    async def ask_apart(self, body: messages.RequestBody, kind: type[_Body]) -> _Body:
        """Like `ask`, on a connection of its own: for answers that take long, while others want to ask too."""
        self._require_ready()

        def ask() -> _Body:
            with self._new_client() as client:
                return client.ask(body, kind)

        return await asyncio.get_running_loop().run_in_executor(self._threads.waiting, ask)

    async def hold(self, pool_id: str) -> RemoteHold:
        """A hold on a connection of its own, which the caller closes. Raises as `ask` does."""
        self._require_ready()

        def attach() -> RemoteHold:
            path = self._settings.run_directory.worker_socket(self.device)
            return RemoteHold(WorkerClient(path, client_name="a client over HTTP"), pool_id)

        return await asyncio.get_running_loop().run_in_executor(self._threads.asking, attach)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            lived_s = await self._serve_once()
            external = self._settings.external_workers
            await asyncio.sleep(EXTERNAL_RETRY_S if external else self._delay.after(lived_s))

    async def stop(self) -> None:
        """After `run()`: end the worker if it is this server's to end."""
        process, self._process = self._process, None
        if process is None:
            return
        leave = self._settings.external_workers or self._settings.leave_workers
        if not leave and process.was_started_by_a_server:
            await process.end(grace_s=END_GRACE_S)
        process.close()

    # --- opening and losing ------------------------------------------------------------------------------------------

    async def _serve_once(self) -> float:
        """From one connection to its loss; seconds that it served."""
        loop = asyncio.get_running_loop()
        served_since_s: float | None = None
        try:
            await self._open()
            served_since_s = loop.time()
            await self._until_lost()
            self._note(self._loss())
        except (KvpageError, OSError) as error:
            self._note(str(error))
        except Exception:  # a bug met with one worker must not end the care for its successors
            logger.exception("device %s", self.device)
            self._note("kvpage made a mistake; the server's log has the cause")
        finally:
            self._drop_client()
        return 0.0 if served_since_s is None else loop.time() - served_since_s

    async def _open(self) -> None:
        client = await self._found() or await self._started()
        self._client = client
        self._broken.clear()
        self._watch(client)
        is_new_worker = self._process is None or self._process is not self._served_process
        await self._owner.connected(is_new_worker=is_new_worker)
        self._served_process = self._process
        self.num_workers += is_new_worker
        logger.info("device %s: worker %d answers", self.device, client.welcome.worker_pid)
        self.state, self.detail = "ready", ""
        self.ready.set()

    async def _found(self) -> WorkerClient | None:
        """A connection to a worker that is there already, whoever started it."""
        try:
            return await self._in_thread(self._new_client)
        except WorkerLost:
            return None

    async def _started(self) -> WorkerClient:
        if self._settings.external_workers:
            raise DeviceUnavailable(f"no worker serves it; start `kvpage worker --device {self.device}`")
        await self._last_process_gone()
        process = WatchedProcess.start(self._settings, self.device)
        self._replace_process(process)
        why_not = await process.wait_ready()
        if why_not is not None:
            raise DeviceUnavailable(f"its worker ended when it started{self._exit_text(why_not)}")
        return await self._in_thread(self._new_client)

    async def _last_process_gone(self) -> None:
        """It does not answer any more, and its successor needs its lock."""
        process = self._process
        if process is None or process.ended.is_set():
            return
        if process.was_started_by_a_server:
            await process.end(grace_s=END_GRACE_S)
        else:
            await asyncio.wait_for(process.ended.wait(), END_GRACE_S)

    def _watch(self, client: WorkerClient) -> None:
        """Watch the process behind `client`; the one watched already stays if it is the same."""
        process, before = WatchedProcess.behind(client.fileno()), self._process
        if process is not None and before is not None and process.pid == before.pid and not before.ended.is_set():
            process.close()
        else:
            self._replace_process(process)

    def _replace_process(self, process: WatchedProcess | None) -> None:
        if self._process is not None:
            self._process.close()
        self._process = process

    async def _until_lost(self) -> None:
        while True:
            if await self._lost_within(self._tick_s):
                if not self._was_replaced():
                    return
                await self._follow_successor()
            try:
                await self._owner.tick()
            except (WorkerLost, DeviceUnavailable):
                raise
            except KvpageError as error:  # an answer, so the worker is there
                logger.warning("device %s: its worker answered %s: %s", self.device, error.code, error.message)

    def _was_replaced(self) -> bool:
        """Whether the worker has ended and its successor goes on with this connection."""
        has_ended = self._process is not None and self._process.ended.is_set()
        return has_ended and self._client is not None and not self._client.ended and not self._broken.is_set()

    async def _follow_successor(self) -> None:
        """It has the connection and every pool already; only who it is must be found out, by connecting once more."""
        client = await self._in_thread(self._new_client)
        self._watch(client)
        self._served_process = self._process
        self.num_workers += 1
        logger.info("device %s: worker %d has taken over", self.device, client.welcome.worker_pid)
        client.close()

    async def _lost_within(self, timeout_s: float) -> bool:
        signs = [self._broken] if self._process is None else [self._broken, self._process.ended]
        waits = [asyncio.ensure_future(sign.wait()) for sign in signs]
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return bool(done)

    def _loss(self) -> str:
        if self._process is None or not self._process.ended.is_set():
            return "the connection to its worker broke"
        return f"its worker ended{self._exit_text()}"

    def _note(self, detail: str) -> None:
        if detail != self.detail:
            logger.warning("device %s: %s", self.device, detail)
        self.state, self.detail = "lost", detail

    def _exit_text(self, last_words: str = "") -> str:
        """Status and last words of a worker of ours that has ended; if they are not known, from its log."""
        status = None if self._process is None else self._process.exit_status
        if status is None:
            return ""
        if status < 0:
            return f", killed by signal {-status}"
        last_words = last_words or last_logged_line(self._settings, self.device)
        return f" with status {status}; its last words: {last_words}"

    # --- the client, in threads --------------------------------------------------------------------------------------

    def _new_client(self) -> WorkerClient:
        path = self._settings.run_directory.worker_socket(self.device)
        return WorkerClient(path, role="api", client_name="kvpage serve")

    def _connected_client(self) -> WorkerClient:
        if self._client is None:
            raise self._unavailable()
        return self._client

    def _require_ready(self) -> None:
        if not self.is_ready:
            raise self._unavailable()

    def _unavailable(self) -> DeviceUnavailable:
        return DeviceUnavailable(
            f"device {self.device} is {self.state}: {self.detail}", details={"device": self.device, "state": self.state}
        )

    def _drop_client(self) -> None:
        self.ready.clear()
        client, self._client = self._client, None
        if client is not None:
            self._threads.asking.submit(client.close)  # it waits for a request that is under way

    async def _noticing_loss(self, client: WorkerClient, work: Callable[[], _Result]) -> _Result:
        try:
            return await self._in_thread(work)
        except WorkerLost:
            if client is self._client:
                self._broken.set()
            raise

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads.asking, work)
