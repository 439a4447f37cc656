"""Attaching to pools through the device worker's socket."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from kvpage.client.attachment import Attachment
from kvpage.client.patience import Patience
from kvpage.client.views import PlannedViews, Wrap, wrap_host
from kvpage.errors import (
    Conflict,
    DeviceUnavailable,
    KvpageError,
    PoolNotFound,
    ProtocolError,
    StaleHandle,
    WorkerLost,
    shorten,
)
from kvpage.memory.base import Mapping, MemoryKind
from kvpage.memory.host import HostMemory
from kvpage.plans import Plan
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages
from kvpage.wire.channel import close_fds
from kvpage.wire.client import WorkerClient

MAX_KNOWN_PLANS = 16


def attach(
    name: str,
    *,
    device: str | None = None,
    run_dir: str | None = None,
    plan_id: str | None = None,
    epoch: str | None = None,
    client_name: str | None = None,
    wrap: Wrap = wrap_host,
    timeout_s: float = 10.0,
) -> Attachment:
    """Map pool `name` into this process. Needs only the worker; the pool stays held until the memory is unmapped.

    `device`: ask this one only; else every worker in the run directory. `plan_id`, `epoch`: refuse any other.
    `wrap`: how the mapped memory becomes a uint8 tensor. `timeout_s`: how long to go on trying while no worker answers
    or it refuses for now (`error.retryable`): a worker that dies has a successor soon.

    Raises `PoolNotFound`, `Conflict` (several devices have the name, or the pool is not ready), `StaleHandle`,
    `WorkerLost`, `DeviceUnavailable`, `PermissionDenied`.
    """
    runs = RunDirectory.default(run_dir)
    with Patience(runs.path, timeout_s) as patience:
        while True:
            try:
                return _attach_once(name, runs, device, plan_id, epoch, client_name, wrap)
            except KvpageError as error:
                patience.wait(error)


def _attach_once(
    name: str,
    runs: RunDirectory,
    device: str | None,
    plan_id: str | None,
    epoch: str | None,
    client_name: str | None,
    wrap: Wrap,
) -> Attachment:
    where = device if device is not None else _device_with(name, runs)
    _check_served(where, runs)
    connection = Connection(runs.worker_socket(where), client_name=client_name)
    try:
        return connection.attach(name, plan_id=plan_id, epoch=epoch, wrap=wrap, owned=True)
    except BaseException:
        connection.close()
        raise


def connect(device: str = "host", *, run_dir: str | None = None, client_name: str | None = None) -> Connection:
    """A connection to one device's worker, for processes that attach often. Raises as `attach` does."""
    runs = RunDirectory.default(run_dir)
    _check_served(device, runs)
    return Connection(runs.worker_socket(device), client_name=client_name)


def _check_served(device: str, runs: RunDirectory) -> None:
    if not runs.worker_socket(device).exists():
        raise DeviceUnavailable(
            f"no worker for device {shorten(device)} has a socket in {runs.path}; start one with `kvpage serve`"
        )


def _device_with(name: str, runs: RunDirectory) -> str:
    devices = [device for device, _ in runs.worker_sockets()]
    if not devices:
        raise DeviceUnavailable(f"no device worker has a socket in {runs.path}; start one with `kvpage serve`")
    if len(devices) == 1:
        return devices[0]
    found: list[str] = []
    lost: list[KvpageError] = []
    for device in devices:
        try:
            with WorkerClient(runs.worker_socket(device)) as worker:
                worker.ask(messages.FindPool(name=name), messages.PoolState)
                found.append(device)
        except PoolNotFound:
            continue
        except WorkerLost as error:
            lost.append(error)
    if len(found) > 1:
        raise Conflict(f"pool {shorten(name)!r} exists on {', '.join(found)}; name the device")
    if found:
        return found[0]
    if len(lost) == len(devices):
        raise lost[0]
    raise PoolNotFound(f"no pool {shorten(name)!r} on {', '.join(devices)}; create it first (`kvpage pools create`)")


class Connection:
    """A live connection to one device's worker. Closing it ends no attachment made through it."""

    def __init__(self, socket_path: str | os.PathLike[str], *, client_name: str | None = None) -> None:
        """Raises `WorkerLost`, `PermissionDenied`."""
        self._client = WorkerClient(socket_path, client_name=_program_name() if client_name is None else client_name)
        self._kinds: dict[str, MemoryKind] = {HostMemory.handle_kind: HostMemory()}
        self._plans: OrderedDict[str, PlannedViews] = OrderedDict()
        self._plan_ids: dict[str, str] = {}  # by pool name, as last seen
        self._users: set[object] = set()  # hold ids, and a token for each attach in progress
        self._closing = False

    @property
    def device(self) -> str:
        return self._client.welcome.device

    @property
    def closed(self) -> bool:
        return self._closing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Attach no more. The socket, and with it the worker's record of our holds, goes with the last attachment."""
        self._closing = True
        self._close_when_unused()

    def attach(
        self,
        name: str,
        *,
        plan_id: str | None = None,
        epoch: str | None = None,
        wrap: Wrap = wrap_host,
        owned: bool = False,
    ) -> Attachment:
        """As `kvpage.attach`, over this connection. `owned`: the connection ends with the attachment."""
        attaching = object()
        self._users.add(attaching)  # before the look at `_closing`, which `close` sets before it looks at the users
        try:
            if self._closing:
                raise StaleHandle(f"the connection to the worker of {self.device} is closed; connect again")
            return self._attach(name, plan_id, epoch, wrap, owned=owned)
        finally:
            self._users.discard(attaching)
            if self._closing:
                self._close_when_unused()

    def _attach(self, name: str, plan_id: str | None, epoch: str | None, wrap: Wrap, *, owned: bool) -> Attachment:
        known = self._plans.get(self._plan_ids.get(name, ""))
        request = messages.Attach(
            name=name, plan_id=plan_id, epoch=epoch, known_plan_id=known.plan.plan_id if known else None
        )
        reply = self._client.request(request)
        if not isinstance(reply.body, messages.Attached):
            close_fds(reply.fds)
            raise ProtocolError(f"the worker answered an attach with {type(reply.body).__name__}")
        attached = reply.body
        with ExitStack() as undo:
            undo.callback(self._client.send_later, messages.Detach(hold_id=attached.hold_id))
            views = self._views(attached, reply.fds, known)
            mapping = self._map(attached, reply.fds, views.plan.buffer_size_bytes)
            undo.callback(mapping.close)
            attachment = Attachment(views, attached.pool, mapping, wrap, lambda: self._client.ended)
            undo.pop_all()
        self._plan_ids[name] = attached.pool.plan_id
        self._users.add(attached.hold_id)
        mapping.on_unmapped(self._released(attached.hold_id))
        if owned:
            self._closing = True
        return attachment

    def _views(self, attached: messages.Attached, fds: list[int], known: PlannedViews | None) -> PlannedViews:
        """The pool's plan, proven once and then remembered; the descriptors are closed if it is refused."""
        try:
            if attached.plan is not None:
                views = PlannedViews(Plan.from_json(attached.plan))
            elif known is not None:
                views = known
            else:
                raise ProtocolError(f"the worker sent no plan for {attached.pool.plan_id}")
            plan_id = views.plan.plan_id
            if plan_id != attached.pool.plan_id:
                raise ProtocolError(f"the pool names plan {attached.pool.plan_id}, but came with {plan_id}")
        except BaseException:
            close_fds(fds)
            raise
        self._plans[plan_id] = views
        self._plans.move_to_end(plan_id)
        if len(self._plans) > MAX_KNOWN_PLANS:
            self._plans.popitem(last=False)
        return views

    def _map(self, attached: messages.Attached, fds: list[int], size_bytes: int) -> Mapping:
        """Map the one chunk of the pool; the descriptors are closed whatever happens."""
        try:
            if len(fds) != 1 or len(attached.chunks) != 1:
                raise ProtocolError(f"pool {attached.pool.name!r} came with {len(fds)} descriptors; one is expected")
            chunk = attached.chunks[0]
            if chunk.size_bytes != size_bytes:
                raise ProtocolError(f"pool {attached.pool.name!r} has {chunk.size_bytes} bytes, its plan {size_bytes}")
            kind = self._kinds.get(chunk.kind)
            if kind is None:
                raise DeviceUnavailable(
                    f"pool {attached.pool.name!r} is memory of kind {shorten(chunk.kind)!r}, which is not mapped here"
                )
        except BaseException:
            close_fds(fds)
            raise
        with kind.import_chunk(fds[0], chunk.size_bytes) as imported:
            return imported.map()

    def _released(self, hold_id: int) -> Callable[[], None]:
        def tell_worker() -> None:
            self._users.discard(hold_id)
            self._client.send_later(messages.Detach(hold_id=hold_id))
            if self._closing:
                self._close_when_unused()

        return tell_worker

    def _close_when_unused(self) -> None:
        if not self._users:
            self._client.close()


def _program_name() -> str:
    return Path(sys.argv[0]).name[:200] if sys.argv and sys.argv[0] else "python"
