"""One client of a worker: its socket, what it is owed, and what it holds."""

from __future__ import annotations

import selectors
import socket
import traceback
from collections.abc import Sequence

from kvpage.errors import (
    Conflict,
    InternalError,
    KvpageError,
    PermissionDenied,
    ProtocolError,
    RateLimited,
    SpecInvalid,
    TooLarge,
)
from kvpage.wire import leasing, messages, succession
from kvpage.wire.channel import MAX_FRAME_BYTES, FrameReader, Outbox, close_fds, keep_urgent_data
from kvpage.wire.credentials import Peer
from kvpage_server.connection_handler import Handler, Quick
from kvpage_server.request_rules import check_request
from kvpage_server.worker_limits import Limits
from kvpage_server.worker_log import log
from kvpage_server.worker_loop import Deadline, Loop
from kvpage_server.worker_pool_entry import Pool

_MAX_MOVED_BYTES = MAX_FRAME_BYTES - (256 << 10)  # the rest is for the holds and leases of a client


class Connection:
    """Reads requests while its client reads the replies; closes itself when the client breaks a rule."""

    def __init__(self, sock: socket.socket, peer: Peer, loop: Loop, limits: Limits, handler: Handler) -> None:
        self.peer = peer
        self.limits = limits
        self.role: messages.Role | None = None
        """None until the client has said hello."""
        self.client_name = ""
        self.holds: dict[int, Pool] = {}
        self.leases: dict[str, tuple[Pool, int]] = {}
        """By lease id: the pool, and the hold on it that the lease is."""
        self.quick: Quick | None = None
        """What answers most steps of a client that leases blocks."""
        self.num_waits = 0
        self.closed = False
        self._socket = sock
        self._loop = loop
        self._handler = handler
        self._reader = FrameReader()
        self._outbox = Outbox()
        self._unacknowledged: int | None = None
        self._ending = False
        self._paused = False
        self._watched = selectors.EVENT_READ
        self._counted_bytes = 0
        self._until_hello = Deadline(loop, limits.hello_s, lambda: self._give_up("no hello"))
        self._until_whole = Deadline(loop, limits.frame_s, self._refuse_half_a_request)
        self._until_read = Deadline(loop, limits.stall_s, lambda: self._give_up("replies not read"))
        self._until_hello.start()
        sock.setblocking(False)
        keep_urgent_data(sock)
        loop.watch(sock, self._watched, self._on_ready)

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.role or "new"
        return f"<Connection pid {self.peer.pid} {state}, {len(self.holds)} holds, {self._outbox!r}>"

    # --- for handlers ------------------------------------------------------------------------------------------------

    def welcome(self, role: messages.Role, client_name: str) -> None:
        self.role, self.client_name = role, client_name
        self._until_hello.cancel()

    def reply(self, request_id: int, body: messages.ReplyBody, fds: Sequence[int] = ()) -> None:
        """Answer a request; owns `fds`. Does nothing for a request that wants no answer, or when the client is gone."""
        self._send(messages.ReplyFrame(id=request_id, epoch=self._handler.epoch, body=body), fds)

    def fail(self, request_id: int, error: KvpageError) -> None:
        wire_error = messages.WireError.from_error(error)
        self._send(messages.ReplyFrame(id=request_id, epoch=self._handler.epoch, error=wire_error))

    def perform(self, request_id: int, body: messages.RequestBody, fds: list[int]) -> None:
        """Have the request answered; owns `fds`."""
        try:
            if self.quick is not None and type(body) is leasing.TakeStep:
                granted = self.quick(self, body)
                if granted is not None:
                    frame = messages.ReplyFrame(id=request_id, epoch=self._handler.epoch, body=granted)
                    self._push(messages.encode(frame), ())
                    return
            self._handler.handle(self, request_id, body, fds)
        except KvpageError as error:
            self.fail(request_id, error)
        except Exception as error:  # noqa: BLE001 - one request must not cost the others their connection
            log("internal_error", level="error", traceback=traceback.format_exc())
            self.fail(request_id, InternalError(f"the worker failed at this: {type(error).__name__}"))

    def require_api(self) -> None:
        if self.role != "api":
            raise PermissionDenied(
                "only a connection of role 'api' may do this: it is for the process that manages pools"
            )

    def require_room_to_wait(self) -> None:
        """Raises `RateLimited` when as many requests of this connection wait as may."""
        limit = self.limits.max_waits
        if self.num_waits >= limit:
            raise RateLimited(f"{limit} requests of this connection wait already; wait on another connection")

    def require_acknowledged(self) -> None:
        """Raise `Conflict` while the client has not acknowledged the last reply with descriptors."""
        if self._unacknowledged is not None:
            raise Conflict(
                f"the descriptors of reply {self._unacknowledged} are not acknowledged; read that reply and send"
                f" ack={self._unacknowledged} with the next request",
                details={"unacknowledged": self._unacknowledged},
            )

    def end(self) -> None:
        """Look at no further request, and close when everything that was answered is sent."""
        self._ending = True
        self._forget_requests()
        self._flush()

    def refuse(self, error: KvpageError) -> None:
        """Say why, as far as the client listens, and close."""
        wire_error = messages.WireError.from_error(error)
        self._push(messages.encode(messages.ReplyFrame(id=0, epoch=self._handler.epoch, error=wire_error)), ())
        self.end()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._until_hello.cancel()
        self._until_read.cancel()
        self._loop.watch(self._socket, 0, self._on_ready)
        self._handler.dispose(self._socket)
        self._forget_requests()
        self._outbox.close()
        self._handler.disconnected(self)

    # --- changing workers --------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._socket.fileno()

    def pause(self) -> None:
        """Neither read nor send: the client waits, and time does not count against it."""
        self._paused = True
        self._until_hello.cancel()
        self._until_read.cancel()
        self._until_whole.cancel()
        self._watched = 0
        if not self.closed:
            self._loop.watch(self._socket, 0, self._on_ready)

    def resume(self) -> None:
        if self.closed:
            return
        self._paused = False
        if self.role is None:
            self._until_hello.start()
        self._loop.post(self._on_ready)  # and no sooner: a worker that takes over may still fail to

    @property
    def is_movable(self) -> bool:
        """Whether `packed` can say all: descriptors on their way and too many bytes cannot be moved."""
        num_bytes = self._reader.num_bytes + self._outbox.num_bytes
        has_fds = self._outbox.has_unsent_fds or self._reader.has_untaken_fds
        return not self.closed and not self._ending and not has_fds and num_bytes < _MAX_MOVED_BYTES

    def packed(self) -> succession.ConnectionTaken:
        """What another worker must know to go on with this client, beside its socket.

        Holds of forgotten pools are left out: a successor budgets from what the device has.
        """
        holds = {hold_id: pool for hold_id, pool in self.holds.items() if pool.state == "ready"}
        return succession.ConnectionTaken(
            role=self.role,
            client_name=self.client_name,
            holds=[succession.TakenHold(hold_id=hold_id, pool_id=pool.pool_id) for hold_id, pool in holds.items()],
            leases=[
                succession.TakenLease(lease_id=lease_id, hold_id=hold_id, pool_id=pool.pool_id)
                for lease_id, (pool, hold_id) in self.leases.items()
            ],
            unacknowledged=self._unacknowledged,
            unread=self._reader.unread,
            unsent=self._outbox.unsent,
        )

    def unpack(self, packed: succession.ConnectionTaken, holds: dict[int, Pool]) -> None:
        """Go on with the client of a worker that was replaced, when the loop runs."""
        self.role, self.client_name, self.holds = packed.role, packed.client_name, dict(holds)
        self._unacknowledged = packed.unacknowledged
        self._reader.feed(packed.unread)
        self._outbox.push_rest(packed.unsent)
        self._until_hello.cancel()
        self.resume()

    # --- in --------------------------------------------------------------------------------------------------------

    def _on_ready(self) -> None:
        if self.closed or self._paused:
            return
        try:
            if not self._is_reading:
                self._work()
                return
            read = self._read()
            if read is True:
                self._work()
            elif read is False:
                self.close()
            else:
                self._handle(read, [])
        except ProtocolError as error:
            log("protocol_error", level="warning", client_pid=self.peer.pid, reason=error.message)
            self.refuse(error)
        except OSError:  # the client is gone
            self.close()

    @property
    def _is_reading(self) -> bool:
        return not self._ending and self._outbox.num_bytes <= self.limits.max_queued_bytes

    def _read(self) -> memoryview | bool:
        """A whole request; or whether more may come, and something has."""
        # Role `api` is the worker's own user or root, who could end the worker anyway; nobody else sends descriptors.
        read = self._reader.read if self.role == "api" else self._reader.read_request
        try:
            return read(self._socket)
        except BlockingIOError:  # ready for writing only
            return True

    def _work(self) -> None:
        """Requests and replies in turns, until a whole request or room for its reply is missing."""
        self._flush()
        while not self.closed and self._is_reading and (frame := self._reader.take()) is not None:
            self._until_whole.cancel()
            self._handle(frame.payload, frame.fds)
            self._flush()
        self._wait_for_the_rest()

    @property
    def num_unfinished_bytes(self) -> int:
        return self._reader.num_bytes

    def _wait_for_the_rest(self) -> None:
        if self.closed or not self._is_reading or not self._reader.num_bytes:
            self._until_whole.cancel()
        else:
            self._until_whole.start()
        self._count()

    def _refuse_half_a_request(self) -> None:
        log("client_refused", level="warning", client_pid=self.peer.pid, reason="half a request")
        self.refuse(ProtocolError(f"a request that began was not whole after {self.limits.frame_s:g} s"))

    def _forget_requests(self) -> None:
        self._until_whole.cancel()
        self._reader.close()
        self._count()

    def _count(self) -> None:
        grown_bytes = self._reader.num_bytes - self._counted_bytes
        self._counted_bytes += grown_bytes
        if grown_bytes:
            self._handler.received(grown_bytes)

    def _handle(self, payload: bytes | memoryview, fds: list[int]) -> None:
        try:
            request = messages.decode_request(payload)
        except ProtocolError:
            close_fds(fds)
            raise
        if isinstance(request, messages.InvalidRequest):
            close_fds(fds)
            self.fail(request.id, SpecInvalid(f"request {request.id} cannot be read: {request.reason}"))
            return
        check_request(request, fds, greeted=self.role is not None)
        if request.ack is not None and request.ack == self._unacknowledged:
            self._unacknowledged = None
        self.perform(request.id, request.body, fds)

    # --- out -------------------------------------------------------------------------------------------------------

    def _send(self, frame: messages.ReplyFrame, fds: Sequence[int] = ()) -> None:
        if frame.id == 0:
            close_fds(fds)
            return
        payload = messages.encode(frame)
        if len(payload) > MAX_FRAME_BYTES:
            close_fds(fds)
            self.fail(frame.id, TooLarge(f"the reply has {len(payload)} bytes, a frame at most {MAX_FRAME_BYTES}"))
            return
        if fds:
            self._unacknowledged = frame.id
        self._push(payload, fds)

    def _push(self, payload: bytes, fds: Sequence[int]) -> None:
        if self.closed:
            close_fds(fds)
            return
        if fds or self._paused:
            self._outbox.push(payload, fds)
        else:
            try:
                if self._outbox.send(self._socket, payload) and self._is_quiet:
                    return
            except OSError:  # the client is gone
                self.close()
        self._flush()

    @property
    def _is_quiet(self) -> bool:  # nothing is to be done when all was sent
        return self._watched == selectors.EVENT_READ and not self._ending

    def _flush(self) -> None:
        if self.closed or self._paused:
            return
        queued_bytes = self._outbox.num_bytes
        if not queued_bytes and self._is_quiet:
            return
        try:
            done = self._outbox.flush(self._socket)
        except OSError:  # the client is gone
            self.close()
            return
        if self._outbox.num_bytes < queued_bytes or done:
            self._until_read.cancel()
        if done and self._ending:
            self.close()
            return
        if not done:
            self._until_read.start()
        self._watch(done)

    def _watch(self, sent_all: bool) -> None:
        wanted = (selectors.EVENT_READ if self._is_reading else 0) | (0 if sent_all else selectors.EVENT_WRITE)
        if wanted != self._watched:
            self._watched = wanted
            self._loop.watch(self._socket, wanted, self._on_ready)

    def _give_up(self, reason: str) -> None:
        log("client_closed", level="warning", client_pid=self.peer.pid, client_name=self.client_name, reason=reason)
        self.close()
