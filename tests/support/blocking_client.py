"""`AsyncClient` for tests written for `Client`: each call is awaited on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any, Self, cast

import kvpage


class BlockingClient:
    """Has whatever attributes the client has; its coroutine functions are called and waited for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="blocking-client")
        self._thread.start()
        try:
            self._client = self._wait(_made, *arguments, **options)
        except BaseException:
            self._end_loop()
            raise

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if not inspect.iscoroutinefunction(value):
            return value
        return lambda *arguments, **options: self._wait(value, *arguments, **options)

    def __repr__(self) -> str:
        return repr(self._client)

    def __enter__(self) -> Self:
        self._wait(self._client.__aenter__)
        return self

    def __exit__(self, *error: object) -> None:
        self._wait(self._client.__aexit__, *error)
        self._end_loop()

    def _wait(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(function(*arguments, **options), self._loop).result(60)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _made(*arguments: Any, **options: Any) -> kvpage.AsyncClient:
    return kvpage.AsyncClient(*arguments, **options)


BOTH_CLIENTS = [kvpage.Client, cast("type[kvpage.Client]", BlockingClient)]
"""To test them with one suite."""
