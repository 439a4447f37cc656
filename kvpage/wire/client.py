"""The client's end of the worker protocol: one socket, one request at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from kvpage.errors import KvpageError, PermissionDenied, ProtocolError, TooLarge, WorkerLost
from kvpage.run_directory import checked_socket_path
from kvpage.wire import messages
from kvpage.wire.channel import MAX_FRAME_BYTES, Frame, FrameReader, Outbox, close_fds
from kvpage.wire.credentials import peer_of

_Body = TypeVar("_Body", bound=messages.Body)


class Reply(NamedTuple):
    body: messages.ReplyBody
    fds: list[int]
    """Open descriptors that came with it, owned by the caller."""


class WorkerClient:
    """A connection to a device worker. What it holds there ends when it is closed or when this process dies.

    Safe to share between threads: requests take turns, so a thread that waits long (`WaitPool`) wants a client of its
    own. Not inherited by a forked child, which finds its copy closed.
    """

    welcome: messages.Welcome

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        role: messages.Role = "client",
        client_name: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        """Connect and say hello. `timeout_s` bounds this and every later request.

        Raises `WorkerLost` when nobody listens, `PermissionDenied` when this user may not connect or the socket
        belongs to a stranger, and whatever the worker refuses with.
        """
        self._path = checked_socket_path(Path(socket_path))
        self.timeout_s = timeout_s
        """Of the requests to come."""
        self._lock = threading.Lock()  # guards the socket, the reader, the outbox and the ids
        self._later: deque[messages.RequestBody] = deque()
        self._reader = FrameReader()
        self._outbox = Outbox()
        self._ids = itertools.count(1)
        self._ack: int | None = None
        self._epoch = ""
        self._closing = False
        self._socket: socket.socket | None = _connect(self._path, timeout_s)
        _clients.add(self)
        try:
            hello = messages.Hello(version=messages.PROTOCOL_VERSION, role=role, client_name=client_name)
            self.welcome = self.ask(hello, messages.Welcome)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<WorkerClient {self._path} {'closed' if self.closed else 'open'}>"

    @property
    def epoch(self) -> str:
        """The epoch in the last reply: another one means that the worker lost the pools of the one before."""
        return self._epoch

    @property
    def closed(self) -> bool:
        return self._closing or self._socket is None

    @property
    def ended(self) -> bool:
        """Whether the connection is over, from whichever side: then nothing is held through it any more."""
        fd = self.fileno()
        if self.closed or fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)
        return bool(poll.poll(0))

    def fileno(self) -> int:
        """Of the socket. While no request is under way it becomes readable when the worker is gone; -1 when closed."""
        sock = self._socket
        return -1 if sock is None else sock.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and every hold it has. May be called twice.

        Never blocks, so finalisers may call it: a request under way in another thread ends with `WorkerLost`.
        """
        self._closing = True
        sock = self._socket
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()
        elif sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # whoever has the lock meets the end of the stream and closes

    def ask(self, body: messages.RequestBody, kind: type[_Body], fds: Sequence[int] = ()) -> _Body:
        """`request` for a reply of type `kind` without descriptors."""
        reply = self.request(body, fds)
        close_fds(reply.fds)
        if not isinstance(reply.body, kind):
            raise ProtocolError(f"the worker answered {type(body).__name__} with {type(reply.body).__name__}")
        return reply.body

    def request(self, body: messages.RequestBody, fds: Sequence[int] = ()) -> Reply:
        """Send `body` with copies of `fds` and wait for its reply.

        Raises the error the worker answered with, or `WorkerLost` when the connection ended or no reply came in time;
        the client is closed then, as a late reply could be taken for another's.
        """
        wait_s = body.timeout_s if isinstance(body, messages.WaitPool | messages.DeletePool) else 0.0
        deadline = time.monotonic() + self.timeout_s + wait_s
        try:
            with self._lock:
                frame, received = self._exchange(body, fds, deadline)
        finally:
            self._do_left_over()
        if frame.error is not None:
            close_fds(received)
            raise frame.error.to_error()
        assert frame.body is not None  # decode_reply saw to it
        return Reply(frame.body, received)

    def send_later(self, body: messages.RequestBody) -> None:
        """Send `body` without waiting for an answer: now if nothing is in the way, else with the next request.

        Never blocks and never raises, so finalisers may call it from any thread.
        """
        self._later.append(body)
        self._do_left_over()

    def _do_left_over(self) -> None:
        """What others could not do while the lock was taken. Whoever comes too late for this finds the lock free."""
        while (self._later or (self._closing and self._socket)) and self._lock.acquire(blocking=False):
            try:
                if self._closing:
                    self._drop()
                self._send_queued()
            finally:
                self._lock.release()

    def _send_queued(self) -> None:
        if self._socket is None:
            self._later.clear()
            return
        self._push_later()
        with contextlib.suppress(OSError):  # the worker is gone, and with it what the message was about
            self._outbox.flush(self._socket)

    def _push_later(self) -> None:
        while self._later:
            frame = messages.RequestFrame(id=0, ack=self._ack, body=self._later.popleft())
            self._outbox.push(messages.encode(frame))

    def _exchange(
        self, body: messages.RequestBody, fds: Sequence[int], deadline: float
    ) -> tuple[messages.ReplyFrame, list[int]]:
        sock = self._open_socket()
        request_id = next(self._ids)
        payload = _encoded(messages.RequestFrame(id=request_id, ack=self._ack, body=body))
        copies = _duplicates(fds)
        try:
            self._push_later()
            self._outbox.push(payload, copies)
            self._send(sock, deadline)
            return self._receive_reply(sock, request_id, deadline)
        except BaseException:
            self._drop()
            raise

    def _open_socket(self) -> socket.socket:
        if self._socket is None or self._closing:
            raise WorkerLost(f"the connection to {self._path} is closed; connect again")
        return self._socket

    def _send(self, sock: socket.socket, deadline: float) -> None:
        try:
            while not self._outbox.flush(sock):
                _wait(sock, select.POLLOUT, deadline, self._path)
        except OSError:
            self._outbox.close()  # the worker hung up; it may have said why, so go on to read

    def _receive_reply(
        self, sock: socket.socket, request_id: int, deadline: float
    ) -> tuple[messages.ReplyFrame, list[int]]:
        received = self._receive(sock, deadline)
        try:
            reply = messages.decode_reply(received.payload)
            _check_reply(reply, request_id)
        except KvpageError:
            close_fds(received.fds)
            raise
        self._epoch = reply.epoch
        if received.fds:
            self._ack = request_id
        return reply, received.fds

    def _receive(self, sock: socket.socket, deadline: float) -> Frame:
        while (frame := self._reader.take()) is None:
            _wait(sock, select.POLLIN, deadline, self._path)
            try:
                more = self._reader.read(sock)
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerLost(f"the connection to the worker at {self._path} broke: {error.strerror}") from error
            if not more:
                raise WorkerLost(f"the worker at {self._path} has ended the connection")
        return frame

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
        self._reader.close()
        self._outbox.close()

    def _forget_after_fork(self) -> None:
        # Another thread may have held the lock when the process forked; nobody in the child will ever release it.
        self._lock = threading.Lock()
        self._drop()


def _encoded(frame: messages.RequestFrame) -> bytes:
    payload = messages.encode(frame)
    if len(payload) > MAX_FRAME_BYTES:
        raise TooLarge(
            f"a {type(frame.body).__name__} request of {len(payload)} bytes; a worker takes at most {MAX_FRAME_BYTES}",
            details={"length_bytes": len(payload), "limit_bytes": MAX_FRAME_BYTES},
        )
    return payload


def _check_reply(reply: messages.ReplyFrame, request_id: int) -> None:
    if reply.id == 0 and reply.error is not None:
        raise reply.error.to_error()
    if reply.id != request_id:
        raise ProtocolError(f"the worker answered request {reply.id}, request {request_id} was asked")


def _connect(path: Path, timeout_s: float) -> socket.socket:
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        sock.settimeout(timeout_s)
        try:
            sock.connect(os.fspath(path))
        except PermissionError as error:
            raise PermissionDenied(f"uid {os.geteuid()} may not connect to the worker at {path}") from error
        except OSError as error:
            raise WorkerLost(
                f"no worker listens at {path} ({error.strerror or error}); start one with `kvpage worker` or"
                " `kvpage serve`, or name its folder with --run-dir or KVPAGE_RUN_DIR"
            ) from error
        sock.setblocking(False)
        _check_worker(sock, path)
        undo.pop_all()
        return sock


def _check_worker(sock: socket.socket, path: Path) -> None:
    """A worker runs as this user, as root, or as the owner of the folder its socket is in."""
    uid = peer_of(sock).uid
    trusted = {0, os.geteuid(), path.parent.stat().st_uid}
    if uid not in trusted:
        raise PermissionDenied(
            f"the process listening at {path} runs as uid {uid}; a worker there must run as one of {sorted(trusted)}"
        )


def _wait(sock: socket.socket, events: int, deadline: float, path: Path) -> None:
    poll = select.poll()
    poll.register(sock, events)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
        raise WorkerLost(f"the worker at {path} did not answer in time")


def _duplicates(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        copies.extend(os.dup(fd) for fd in fds)
    except OSError:
        close_fds(copies)
        raise
    return copies


_clients: weakref.WeakSet[WorkerClient] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    for client in list(_clients):
        client._forget_after_fork()


os.register_at_fork(after_in_child=_close_in_forked_child)
