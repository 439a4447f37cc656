"""The outermost middleware: gives every request an id and turns whatever escaped into a problem."""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections.abc import Iterable

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpage_server.problems import internal_error, problem_response
from kvpage_server.request_log import log_request

logger = logging.getLogger("kvpage.api")

_OWN_PREFIX = secrets.token_hex(4)
_own_ids = itertools.count()
_ACCEPTED_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestIdMiddleware:
    """Takes the caller's `X-Request-ID` when it is harmless, else makes one; repeats it in the answer.

    An exception no handler knows is logged with the id and answered as `internal`, without a word about its cause.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = request_id_of_headers(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._answer(scope, receive, send, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        """Every line that is logged meanwhile has the id."""
        header = (b"x-request-id", request_id.encode())
        came_s, answered_s = time.monotonic(), None
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status, answered_s
            if message["type"] == "http.response.start":
                status, answered_s = message["status"], time.monotonic()
                message["headers"] = [*message["headers"], header]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.info("the client left before its body was complete")
        except Exception:  # the last resort: a bug must neither end the server nor reach the client
            logger.exception("request failed")
            if status is None:
                await problem_response(internal_error(), request_id)(scope, receive, send_with_id)
        log_request(scope, status, (answered_s or time.monotonic()) - came_s)


def request_id_of_headers(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's, or a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _ACCEPTED_ID.fullmatch(value):
            return str(value, "ascii")
    return f"{_OWN_PREFIX}{next(_own_ids) & 0xFFFFFFFF:08x}"
