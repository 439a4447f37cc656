"""uvicorn's HTTP protocol with bounds on what a connection may send, hold and leave unread, and on the time it takes.

What breaks a bound, or is no HTTP, is answered with a problem like every other error where an answer can still be
sent; then the connection ends. It leans on uvicorn's `app`, `cycle`, `pipeline`, `flow` and `send_400_response` and on
the parser's callbacks; tests of a real server hold them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Hashable
from typing import Any, Literal, NoReturn

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvpage.errors import Draining, HttpInvalid, KvpageError, RateLimited, TooManyClients
from kvpage_server.declined_upgrade import has_body, parser_behind
from kvpage_server.intake import Intake, Share
from kvpage_server.intake_refusals import body_too_large, displaced, framing_too_large, not_in_time
from kvpage_server.lost_client import dropping, ending
from kvpage_server.plan_queue import Asker
from kvpage_server.problems import problem_response
from kvpage_server.request_id import request_id_of_headers

_PIECE_BYTES = 16 << 10  # fed to the parser at once: its state, which decides what is counted, is known in between
Stage = Literal["idle", "head", "body"]


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, intake: Intake, **options: Any) -> None:
        super().__init__(*args, **options)
        self._intake = intake
        self._limits = intake.limits
        self._share: Share | None = None
        self._inner = self.app
        self.app = self._run
        self._stage: Stage = "head"
        self._timed_stage: Stage = "idle"
        self._framing_bytes = 0
        """Since the last piece of a body, or the start of the message."""
        self._body_bytes = 0
        """Of the message that is being received."""
        self._held_bytes: dict[int, int] = {}
        """Of large bodies, by `id` of the request's scope; given back when the application is done with it."""
        self._piece: memoryview = memoryview(b"")
        """What the parser is at."""
        self._refusal: KvpageError | None = None
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._served: RequestResponseCycle | None = None
        self._is_lost = False
        self._waits_since = self._intake.next_turn()
        self.peer: Hashable = None
        self.unread_bytes = 0

    # --- the connection ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        is_unix = transport.get_extra_info("socket").family == socket.AF_UNIX
        if is_unix:
            self.peer = self.app_state["caller"].peer.pid
        else:  # without an address where the client has reset the connection by now
            self.peer = (transport.get_extra_info("peername") or (None,))[0]
        self.app_state = {**self.app_state, "asker": Asker(key=self.peer, has_left=transport.is_closing)}
        super().connection_made(transport)
        share = self._intake.unix if is_unix else self._intake.tcp
        try:
            share.enter(self)
        except TooManyClients as error:
            self._is_refused = True
            transport.write(self._answer(error))
            transport.close()  # at once: what lingers takes a descriptor, and it is those that are short
            return
        self._share = share
        self._time_stage()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._stop_timer()
        self._stop_waiting_for_reader()
        for cycle, _ in self.pipeline:  # will never run
            self._give_back(cycle.scope)
        self._tell_gone()
        super().connection_lost(exc)
        if self._share is not None:
            self._share.leave(self)

    # --- in its share (see `intake.Member`) --------------------------------------------------------------------------

    def waits_since(self) -> int | None:
        return self._waits_since if self._can_answer() and self._listens() else None

    def give_way(self) -> None:
        if self.transport.get_write_buffer_size():
            self.drop()
        elif self._stage == "body" or self._framing_bytes:
            self._is_refused = True
            self._stop_timer()
            self.transport.write(self._answer(displaced()))
            self._end_body()
            self.transport.close()
        else:
            self.transport.close()

    def drop(self) -> None:
        self._tell_gone()
        self.transport.abort()

    def _tell_gone(self) -> None:
        """Tell the request that is being answered: uvicorn tells the last one that came, which may wait behind it."""
        if self._served is not None:
            self._served.disconnected = True
            self._served.message_event.set()

    # --- the application ---------------------------------------------------------------------------------------------

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._served = receive.__self__  # type: ignore[attr-defined]  # the method of a cycle
        try:
            await self._inner(scope, ending(receive, self._has_lost_client), dropping(send, self._has_lost_client))
        finally:
            self._served = None
            self._give_back(scope)

    def _has_lost_client(self) -> bool:
        return self._is_lost

    def _give_back(self, scope: Any) -> None:
        held_bytes = self._held_bytes.pop(id(scope), 0)
        if self._share is not None:
            self._share.give_back(held_bytes)

    # --- what is received --------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._stage == "idle":
            self._stage = "head"
            self._waits_since = self._intake.next_turn()
        rest = memoryview(data)
        while len(rest) > 0 and self._listens():
            room_bytes = self._limits.max_head_bytes - self._framing_bytes
            if room_bytes == 0:
                self.refuse(framing_too_large(self._stage, self._limits.max_head_bytes))
                return
            piece = rest[: min(room_bytes, _PIECE_BYTES)]
            rest = rest[len(piece) :]
            self._framing_bytes += len(piece)
            self._piece = piece
            super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
        self._time_stage()

    def _listens(self) -> bool:
        return not (self._is_refused or self.transport.is_closing())

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.max_pipelined:
            self._fail(RateLimited(f"{len(self.pipeline)} requests wait on this connection; wait for their answers"))
        self._stage = "head"
        self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        declared = dict(self.headers).get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self._limits.max_body_bytes:
            self._fail(body_too_large(self._limits.max_body_bytes))
        super().on_headers_complete()
        self._stage = "body"
        self.headers = []  # trailers come after what they could change was decided: the request keeps the old list

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._fail(body_too_large(self._limits.max_body_bytes))
        if self._body_bytes > self._limits.small_body_bytes and not self.cycle.response_complete:
            self._hold(self.cycle.scope)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and has_body(self.scope["headers"]):
            return  # the parser will not read it
        self._stop_timer()
        self._stage = "idle"
        self._framing_bytes = 0
        super().on_message_complete()

    def _hold(self, scope: Any) -> None:
        more_bytes = self._body_bytes - self._held_bytes.get(id(scope), 0)
        assert self._share is not None  # else the connection was refused
        try:
            self._share.take(more_bytes)
        except RateLimited as error:
            self._fail(error)
        self._held_bytes[id(scope)] = self._body_bytes

    # --- refusing ----------------------------------------------------------------------------------------------------

    def _fail(self, error: KvpageError) -> NoReturn:
        """For the parser's callbacks: stops the parser, which then calls `send_400_response`."""
        self._refusal = error
        raise error

    def send_400_response(self, msg: str) -> None:
        self.refuse(self._refusal or HttpInvalid("this is not an HTTP/1.1 request; nothing in it was looked at"))

    def refuse(self, error: KvpageError) -> None:
        """Answer `error` if nothing else is owed to the client, and end the connection.

        What the client still sends is read and dropped for a moment: closing at once would destroy the answer.
        """
        if not self._listens():
            return
        if not self._can_answer():
            self.drop()
            return
        self._is_refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.transport.write(self._answer(error))
        self._end_body()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # over TLS nothing could be received after it
            with contextlib.suppress(OSError):  # the client may have gone
                self.transport.write_eof()
        self._deadline = self.loop.call_later(self._limits.linger_s, self.drop)

    def _end_body(self) -> None:
        if self._stage == "body":  # the application waits for the rest
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        if self._stage == "body" and self._can_answer():
            self.refuse(Draining("the server is shutting down and waits for no more of this request"))
        else:
            super().shutdown()

    def _can_answer(self) -> bool:
        """Whether the next answer on this connection is the one to the request that is being received."""
        if self._stage == "body":
            return not self.pipeline and self.cycle.more_body and not self.cycle.response_started
        return not self._owes_answer()

    def _owes_answer(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, whatever uvicorn's types say
        return cycle is not None and not cycle.response_complete

    def _answer(self, error: KvpageError) -> bytes:
        request_id = request_id_of_headers(self._request_headers())
        response = problem_response(error, request_id, {"Connection": "close", "X-Request-ID": request_id})
        headers = [*self.server_state.default_headers, *response.raw_headers]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join([STATUS_LINE[response.status_code], *lines, b"\r\n", bytes(response.body)])

    def _request_headers(self) -> list[tuple[bytes, bytes]]:
        return list(self.scope["headers"]) if self._stage == "body" else self.headers or []

    def _unsupported_upgrade_warning(self) -> None:
        """Called where the parser stops at a request for another protocol, which is answered in this one."""
        error = sys.exc_info()[1]
        assert isinstance(error, httptools.HttpParserUpgrade)
        rest = self._piece[error.args[0] :]
        try:
            is_amid = self._stage == "body"
            self.parser = parser_behind(self.scope["headers"], self) if is_amid else httptools.HttpRequestParser(self)
        except httptools.HttpParserError:  # a framing that the parser lets pass where it is not to read a body
            self.send_400_response("")
            return
        if rest:
            super().data_received(rest)  # type: ignore[arg-type]  # as above

    # --- time --------------------------------------------------------------------------------------------------------

    def _time_stage(self) -> None:
        """Let the time of a new stage begin. A request that comes whole, as nearly all do, costs no timer."""
        if self._stage == self._timed_stage or self._is_refused:
            return
        self._stop_timer()
        self._timed_stage = self._stage
        if self._stage != "idle":
            self._deadline = self.loop.call_later(self._stage_s(), self._is_late)

    def _stage_s(self) -> float:
        return self._limits.head_s if self._stage == "head" else self._limits.body_s

    def _is_late(self) -> None:
        self._timed_stage = "idle"
        if self.pipeline or (self._stage == "head" and self._owes_answer()):
            self._time_stage()  # it is our answer to an earlier request that takes so long
        elif self._framing_bytes == 0 and self._stage == "head":
            self.transport.close()  # it never said anything, so there is nothing to answer
        else:
            self.refuse(not_in_time(self._stage, self._stage_s()))

    def _stop_timer(self) -> None:
        self._timed_stage = "idle"
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # --- clients that do not read ------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._stop_waiting_for_reader()
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._waits_since = self._intake.next_turn()
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        """Drop the connection when the client reads next to nothing of what is left for it."""
        self._stop_waiting_for_reader()
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes and self._share is not None:
            self._unread = self.loop.call_later(self._limits.unread_s, self._check_reader, unread_bytes)
            self._share.unread(self, unread_bytes)

    def _check_reader(self, unread_bytes: int) -> None:
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes > max(0, unread_bytes - self._limits.min_read_bytes):
            self.drop()
        else:
            self._wait_for_reader()

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self._share is not None:
            self._share.unread(self, 0)
