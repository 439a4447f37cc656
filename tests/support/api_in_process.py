"""The application without a server: requests go straight into it, its lifespan entered as a server would."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpage.run_directory import RunDirectory
from kvpage.wire.credentials import Peer
from kvpage_server.access import Caller
from kvpage_server.app import create_app
from kvpage_server.settings import Settings

BASE_URL = "http://127.0.0.1:8000"
OWN_CALLER = Caller(peer=Peer(pid=os.getpid(), uid=os.geteuid(), gid=os.getegid()), groups=frozenset())


class CalledBy:
    """Lets requests come from a peer of the Unix socket; without it they come from TCP."""

    def __init__(self, app: ASGIApp, caller: Caller) -> None:
        self.app = app
        self.caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["caller"] = self.caller
        await self.app(scope, receive, send)


def settings_without_worker(run_dir: Path, **changes: Any) -> Settings:
    """Settings of a server that waits for a worker nobody starts."""
    return Settings(run_directory=RunDirectory(run_dir), external_workers=True, **changes)


@contextlib.asynccontextmanager
async def in_process(app: FastAPI, caller: Caller | None = OWN_CALLER) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app` while its lifespan lasts. `caller`: None for TCP."""
    asgi: ASGIApp = app if caller is None else CalledBy(app, caller)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url=BASE_URL) as client,
    ):
        yield client


class SyncApi:
    """The application driven from synchronous tests, whose many examples share one lifespan."""

    def __init__(self, settings: Settings) -> None:
        self._runner = asyncio.Runner()
        self._context = in_process(create_app(settings))

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._client = self._runner.run(self._context.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.__exit__(kind, error, trace)

    def post(self, path: str, body: bytes, content_type: bytes = b"application/json") -> httpx.Response:
        return self._runner.run(self._client.post(path, content=body, headers=[(b"Content-Type", content_type)]))
