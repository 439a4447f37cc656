"""The client's end of the worker protocol: one socket, one request at a time."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from kvpage.errors import Conflict, ProtocolError, RateLimited, TooLarge, WorkerLost
from kvpage.owned import Descriptors
from kvpage.run_directory import checked_socket_path
from kvpage.wire import leasing, messages
from kvpage.wire.channel import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES, DescriptorsLost, FrameReader, Outbox, duplicates
from kvpage.wire.connecting import connect, system_error
from kvpage.wire.turns import Turns

_Body = TypeVar("_Body", bound=messages.Body)


class Reply(NamedTuple):
    body: messages.ReplyBody
    fds: list[int]
    """Open descriptors that came with it, owned by the caller."""


class Received:
    """Where a reply goes to. Its descriptors are closed when nobody refers to this any more."""

    def __init__(self) -> None:
        self.body: messages.ReplyBody | None = None
        """None until the reply has come, and when it is an error."""
        self.error: messages.WireError | None = None
        self.fds = Descriptors()


class WorkerClient:
    """A connection to a device worker. What it holds there ends when it is closed or when this process dies.

    Safe to share between threads: requests take turns, so a thread that waits long (`WaitPool`) wants a client of its
    own. A request that is interrupted, by KeyboardInterrupt for example, ends the connection: its reply could be taken
    for another's. Not inherited by a forked child, which finds its copy closed.
    """

    welcome: messages.Welcome
    """What the worker said to the hello; not there before the first answer of a client that `asks_at_once`."""
    _socket: socket.socket | None = None
    _hello_id: int | None = None
    """Of a hello that goes out with the first request, until its answer has come."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        role: messages.Role = "client",
        client_name: str = "",
        timeout_s: float = 10.0,
        asks_at_once: bool = False,
    ) -> None:
        """Connect and say hello. `timeout_s` bounds each of these and every later request.

        `asks_at_once`: the hello goes out with the first request, whose answer is then not a round trip later; and if
        the worker refuses it, the request ends with that.

        Raises what `connecting.connect` does, and whatever the worker refuses with.
        """
        self._path = checked_socket_path(Path(socket_path))
        self.timeout_s = timeout_s
        """Of the requests to come."""
        self._turns = Turns()  # guard the socket, the reader, the outbox and the ids
        self._later: deque[messages.RequestBody] = deque()
        self._reader = FrameReader()
        self._outbox = Outbox()
        self._ids = itertools.count(1)
        self._ack: int | None = None
        self._epoch = ""
        self._closing = False
        self._end = "is closed"  # why there is no socket
        self._socket = connect(self._path, timeout_s)
        _clients.add(self)
        try:
            hello = messages.Hello(version=messages.PROTOCOL_VERSION, role=role, client_name=client_name)
            if asks_at_once:
                self._hello_id = next(self._ids)
                self._outbox.push(_encoded(messages.RequestFrame(id=self._hello_id, body=hello)))
            else:
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

        Never blocks, so finalisers may call it: a request under way ends with `WorkerLost`.
        """
        self._closing = True
        sock = self._socket
        if sock is not None:
            # At once, whoever else has a copy of the descriptor; and whoever has the turn meets the end and closes.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._turns.take(self._drop, wait_s=0)

    def __del__(self, _at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._socket is not None and not _at_exit():
            self.close()

    def ask(self, body: messages.RequestBody, kind: type[_Body], fds: Sequence[int] = ()) -> _Body:
        """`request` for a reply of type `kind` without descriptors."""
        received = Received()
        self.request_into(received, body, fds)
        received.fds.close()
        if not isinstance(received.body, kind):
            raise ProtocolError(f"the worker answered {type(body).__name__} with {type(received.body).__name__}")
        return received.body

    def request(self, body: messages.RequestBody, fds: Sequence[int] = ()) -> Reply:
        """As `request_into`, for programs whose signal handlers raise nothing."""
        received = Received()
        self.request_into(received, body, fds)
        assert received.body is not None  # decode_reply saw to it
        return Reply(received.body, received.fds.release())

    def request_into(self, received: Received, body: messages.RequestBody, fds: Sequence[int] = ()) -> None:
        """Send `body` with copies of `fds` and wait for its reply.

        Raises the error the worker answered with, or `WorkerLost` when the connection ended or no reply came in time:
        the client is closed then, as a late reply could be taken for another's. `RateLimited` when other threads had
        the connection all the time, `Conflict` when this very thread has it and a signal handler or finaliser asks.
        """
        if self._turns.is_mine:
            raise Conflict(
                f"{type(body).__name__} was asked for by a signal handler or a finaliser, in the middle of a request of"
                f" the same thread over the same connection to {self._path}; use a connection of its own there"
            )
        wait_s = _waits_s(body)
        deadline = time.monotonic() + self.timeout_s + wait_s
        try:
            if not self._turns.take(lambda: self._exchange(received, body, fds, deadline), wait_s=self.timeout_s):
                raise RateLimited(
                    f"other threads had the connection to {self._path} for {self.timeout_s:g} s; give each thread that"
                    " waits so long a connection of its own"
                )
        finally:
            self._do_left_over()
        if received.error is not None:
            received.fds.close()
            raise received.error.to_error()

    def send_later(self, body: messages.RequestBody) -> None:
        """Send `body` without waiting for an answer: now if nothing is in the way, else with the next request.

        Never blocks and never raises, so finalisers may call it from any thread.
        """
        self._later.append(body)
        self._do_left_over()

    def _do_left_over(self) -> None:
        """What others could not do while it was not their turn. Whoever comes too late for this has the next turn."""
        while self._later or (self._closing and self._socket):
            if not self._turns.take(self._drop if self._closing else self._send_queued, wait_s=0):
                return

    def _send_queued(self) -> None:
        if self._socket is None:
            return self._drop()
        try:
            self._push_later()
            self._outbox.flush(self._socket)
        except OSError:
            pass  # the worker is gone, and with it what the message was about
        except BaseException as error:
            self._give_up(error)
            raise

    def _push_later(self) -> None:
        while self._later:
            frame = messages.RequestFrame(id=0, ack=self._ack, body=self._later.popleft())
            self._outbox.push(messages.encode(frame))

    def _exchange(self, received: Received, body: messages.RequestBody, fds: Sequence[int], deadline: float) -> None:
        sock = self._open_socket()
        request_id = next(self._ids)
        payload = _encoded(messages.RequestFrame(id=request_id, ack=self._ack, body=body))
        copies = duplicates(fds)
        try:
            self._push_later()
            self._outbox.push(payload, copies)
            self._send(sock, deadline)
            if self._hello_id is not None:
                self._receive_welcome(sock, self._hello_id, deadline)
            self._receive_reply(received, sock, request_id, deadline)
        except BaseException as error:
            received.fds.close()
            self._give_up(error)
            raise

    def _open_socket(self) -> socket.socket:
        if self._socket is None or self._closing:
            raise WorkerLost(f"the connection to {self._path} {self._end}; connect again")
        return self._socket

    def _send(self, sock: socket.socket, deadline: float) -> None:
        try:
            while not self._outbox.flush(sock):
                _wait(sock, select.POLLOUT, deadline, self._path)
        except OSError:
            self._outbox.close()  # the worker hung up; it may have said why, so go on to read

    def _receive_welcome(self, sock: socket.socket, hello_id: int, deadline: float) -> None:
        """What it raises ends the connection: who was not welcomed is not answered."""
        fds = Descriptors()
        reply = messages.decode_reply(self._receive(fds, sock, deadline))
        fds.close()
        _check_reply(reply, hello_id)
        if reply.error is not None:
            raise reply.error.to_error()
        if not isinstance(reply.body, messages.Welcome):
            raise ProtocolError(f"the worker answered Hello with {type(reply.body).__name__}")
        self.welcome, self._hello_id = reply.body, None

    def _receive_reply(self, received: Received, sock: socket.socket, request_id: int, deadline: float) -> None:
        reply = messages.decode_reply(self._receive(received.fds, sock, deadline))
        _check_reply(reply, request_id)
        self._epoch = reply.epoch
        if received.fds:
            self._ack = request_id
        received.body, received.error = reply.body, reply.error

    def _receive(self, fds: Descriptors, sock: socket.socket, deadline: float) -> bytes:
        while (payload := self._reader.take_into(fds)) is None:
            _wait(sock, select.POLLIN, deadline, self._path)
            try:
                more = self._reader.read(sock)
            except BlockingIOError:
                continue
            except DescriptorsLost as error:
                if error.num_received == MAX_FDS_PER_FRAME:
                    raise
                raise system_error("receiving memory", OSError(errno.EMFILE, "")) from error
            except OSError as error:
                raise WorkerLost(f"the connection to the worker at {self._path} broke: {error.strerror}") from error
            if not more:
                raise WorkerLost(f"the worker at {self._path} has ended the connection")
        return payload

    def _give_up(self, error: BaseException) -> None:
        self._end = f"ended when {type(error).__name__} came in the middle of a request, and its holds with it"
        self._drop()

    def _drop(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
        self._later.clear()
        self._reader.close()
        self._outbox.close()

    def _forget_after_fork(self) -> None:
        # Another thread may have had its turn when the process forked; in the child that would never end.
        self._turns = Turns()
        self._end = "was made before a fork"
        self._drop()


def _waits_s(body: messages.RequestBody) -> float:
    """How long the worker may keep the request before it answers."""
    if isinstance(body, messages.WaitPool | messages.DeletePool):
        return body.timeout_s
    return body.wait_s if isinstance(body, leasing.TakeStep | leasing.Reserve | leasing.ReadEvents) else 0.0


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


def _wait(sock: socket.socket, events: int, deadline: float, path: Path) -> None:
    poll = select.poll()
    poll.register(sock, events)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
        raise WorkerLost(f"the worker at {path} did not answer in time")


_clients: weakref.WeakSet[WorkerClient] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    for client in list(_clients):
        client._forget_after_fork()


os.register_at_fork(after_in_child=_close_in_forked_child)
