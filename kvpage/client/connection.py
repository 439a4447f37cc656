"""Attaching to pools through the device worker's socket."""

from __future__ import annotations

import errno
import os
from collections import deque
from typing import Self

from kvpage.client.arguments import checked_optional, checked_seconds, checked_text
from kvpage.client.attachment import Attachment
from kvpage.client.finding import (
    DEFAULT_TIMEOUT_S,
    SHORTEST_ANSWER_S,
    find_run_directory,
    program_name,
    served_socket,
    socket_with,
)
from kvpage.client.hold import Hold, Holds
from kvpage.client.known_plans import KNOWN_PLANS
from kvpage.client.patience import Patience
from kvpage.client.views import PlannedViews, Wrap, wrap_mapping
from kvpage.errors import KvpageError, ProtocolError, SpecInvalid, StaleHandle
from kvpage.memory.base import Mapping, MemoryKind
from kvpage.memory.kinds import memory_kind
from kvpage.owned import Descriptors
from kvpage.plans import Plan
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from kvpage.wire.connecting import system_error
from kvpage.wire.values import MAX_NAME_BYTES


def attach(
    name: str,
    *,
    device: str | None = None,
    run_dir: str | None = None,
    plan_id: str | None = None,
    epoch: str | None = None,
    client_name: str | None = None,
    wrap: Wrap = wrap_mapping,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Attachment:
    """Map pool `name` into this process. Needs only the worker; the pool stays held until the memory is unmapped.

    `device`: ask this one only, by either of its names (`cuda:N` as its worker numbers it, or its UUID); else every
    worker in the run directory. `plan_id`, `epoch`: refuse any other.
    `wrap`: how the mapped memory becomes a uint8 tensor. `timeout_s`: how long to go on trying while no worker answers
    or it refuses for now (`error.retryable`): a worker that dies has a successor soon. 0: once.

    Raises `PoolNotFound`, `Conflict` (several devices have the name, or the pool is not ready), `StaleHandle`,
    `WorkerLost`, `DeviceUnavailable`, `PermissionDenied`, `SpecInvalid` for arguments that cannot be, `InternalError`
    when this process has no descriptor left.
    """
    checked_text("name", name, max_bytes=MAX_NAME_BYTES)
    checked_optional("device", device)
    patience = Patience(checked_seconds("timeout_s", timeout_s))
    runs = find_run_directory(run_dir)
    while True:
        answer_s = max(patience.left_s, SHORTEST_ANSWER_S)
        try:
            path = socket_with(name, runs, answer_s) if device is None else served_socket(device, runs, answer_s)
            with Connection(path, client_name=client_name, timeout_s=answer_s, _asks_at_once=True) as connection:
                return connection.attach(name, plan_id=plan_id, epoch=epoch, wrap=wrap)
        except KvpageError as error:
            patience.wait(error)


def connect(
    device: str = "host",
    *,
    run_dir: str | None = None,
    client_name: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Connection:
    """A connection to one device's worker, for processes that attach often. Raises as `attach` does.

    `timeout_s`: for connecting and for each answer, the wait for other threads that use it included.
    """
    checked_text("device", device)
    path = served_socket(device, find_run_directory(run_dir), checked_seconds("timeout_s", timeout_s))
    return Connection(path, client_name=client_name, timeout_s=timeout_s)


class Connection:
    """A live connection to one device's worker. Closing it ends no attachment made through it.

    Threads may share it; their requests take turns. Signal handlers and finalisers want one of their own: in the
    middle of a request of the same thread they are refused with `Conflict`.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        client_name: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        _asks_at_once: bool = False,  # then there is no `device` before the first answer
    ) -> None:
        """`timeout_s`: for the worker's answers, each of them, and for other threads to finish.

        Raises `WorkerLost`, `PermissionDenied`.
        """
        checked_optional("client_name", client_name, max_bytes=MAX_NAME_BYTES)
        self._client = WorkerClient(
            socket_path,
            client_name=program_name() if client_name is None else client_name,
            timeout_s=checked_seconds("timeout_s", timeout_s),
            asks_at_once=_asks_at_once,
        )
        self._holds = Holds(self._client)
        self._kinds: dict[tuple[str, str], MemoryKind] = {}  # by handle kind and device UUID
        self._path = os.fspath(socket_path)

    def __repr__(self) -> str:
        return f"<Connection to the worker of {self.device}, {'closed' if self.closed else 'open'}>"

    @property
    def device(self) -> str:
        return self._client.welcome.device

    @property
    def closed(self) -> bool:
        """Whether nothing more can be attached: it was closed, or has ended from either side.

        It ends when the worker does, when a request is interrupted (by KeyboardInterrupt for example), and in a forked
        child. Attachments made through it are `detached` then, unless it was closed.
        """
        return self._holds.closed or self._client.ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Attach no more. The socket, and with it the worker's record of our holds, goes with the last attachment."""
        self._holds.close()

    def attach(
        self, name: str, *, plan_id: str | None = None, epoch: str | None = None, wrap: Wrap = wrap_mapping
    ) -> Attachment:
        """As `kvpage.attach`, over this connection. Also raises `Conflict` inside another request of this thread."""
        checked_text("name", name, max_bytes=MAX_NAME_BYTES)
        checked_optional("plan_id", plan_id)
        checked_optional("epoch", epoch)
        if not callable(wrap):
            raise SpecInvalid(f"wrap is a function from a mapping to a uint8 tensor, not {type(wrap).__name__}")
        hold = Hold(self._holds)
        try:
            if self._holds.closed:
                raise StaleHandle(f"the connection to the worker of {self.device} is closed; connect again")
            return self._attach(hold, name, plan_id, epoch, wrap)
        except BaseException:
            hold.release()
            raise

    def _attach(self, hold: Hold, name: str, plan_id: str | None, epoch: str | None, wrap: Wrap) -> Attachment:
        self._check_room_for_a_descriptor()
        known = KNOWN_PLANS.of_pool(self._path, name)
        request = messages.Attach(
            name=name, plan_id=plan_id, epoch=epoch, known_plan_id=known.plan.plan_id if known else None
        )
        self._client.request_into(hold.received, request)
        attached = hold.received.body
        if not isinstance(attached, messages.Attached):
            raise ProtocolError(f"the worker answered an attach with {type(attached).__name__}")
        views = self._views(attached, known)
        mapping = self._map(attached, hold.received.fds, views.plan.buffer_size_bytes)
        hold.received.fds.close()
        try:
            attachment = Attachment(views, attached.pool, mapping, wrap, hold)
        except BaseException:
            mapping.close()
            raise
        KNOWN_PLANS.remember(self._path, name, views)
        mapping.on_unmapped(hold.release)
        return attachment

    def _check_room_for_a_descriptor(self) -> None:
        """A descriptor that finds no room is lost, and the connection with it: ask for none then."""
        try:
            deque(map(os.close, map(os.dup, (self._client.fileno(),))), maxlen=0)  # one call: see kvpage.owned
        except OSError as error:
            if error.errno != errno.EBADF:  # the connection has ended, which the request will say
                raise system_error("attaching", error) from error

    def _views(self, attached: messages.Attached, known: PlannedViews | None) -> PlannedViews:
        """The pool's plan, which is proven when it comes; it does not come where it is known."""
        if attached.plan is not None:
            views = PlannedViews(Plan.from_json(attached.plan))
        elif known is not None:
            views = known
        else:
            raise ProtocolError(f"the worker sent no plan for {attached.pool.plan_id}")
        plan_id = views.plan.plan_id
        if plan_id != attached.pool.plan_id:
            raise ProtocolError(f"the pool names plan {attached.pool.plan_id}, but came with {plan_id}")
        return views

    def _map(self, attached: messages.Attached, fds: Descriptors, size_bytes: int) -> Mapping:
        """Map the one chunk of the pool."""
        if len(fds) != 1 or len(attached.chunks) != 1:
            raise ProtocolError(f"pool {attached.pool.name!r} came with {len(fds)} descriptors; one is expected")
        chunk = attached.chunks[0]
        if chunk.size_bytes != size_bytes:
            raise ProtocolError(f"pool {attached.pool.name!r} has {chunk.size_bytes} bytes, its plan {size_bytes}")
        key = chunk.kind, chunk.device_uuid
        kind = self._kinds.get(key) or self._kinds.setdefault(key, memory_kind(*key))
        return kind.map_chunk(fds[0], chunk.size_bytes, chunk.handle)
