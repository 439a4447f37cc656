"""No body larger than a limit reaches a route, whatever `Content-Length` says or leaves out."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage.errors import TooLarge
from kvpage_server.problems import problem_response, request_id_of

# The rest of a refused body would have to be read before the connection could carry another request.
_CLOSE = {"Connection": "close"}


class BodyLimitMiddleware:
    """Answers 413 before reading when the declared length is over `max_bytes`, else counts bytes as they arrive."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = _declared_bytes(scope)
        if declared is not None and declared > self.max_bytes:
            await self._refuse(declared, scope, receive, send)
            return
        counted = _CountedBody(receive, self.max_bytes)
        try:
            await self.app(scope, counted.receive, send)
        except _BodyTooLarge as error:
            await self._refuse(error.num_bytes, scope, receive, send)

    async def _refuse(self, num_bytes: int, scope: Scope, receive: Receive, send: Send) -> None:
        error = TooLarge(
            f"the body has {num_bytes} bytes or more; at most {self.max_bytes} are read. "
            f"Write repeated layers once with `count`.",
            details={"limit_bytes": self.max_bytes},
        )
        await problem_response(error, request_id_of(scope), _CLOSE)(scope, receive, send)


class _BodyTooLarge(Exception):
    """Crosses the route between `receive` and the middleware; the route has not answered yet when it reads."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class _CountedBody:
    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._max_bytes:
                raise _BodyTooLarge(self._num_bytes)
        return message


def _declared_bytes(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return None
