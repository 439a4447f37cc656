"""When a hold of a client over HTTP ends: with the client, or with the memory."""

from __future__ import annotations

import asyncio
import select
from typing import Self

from kvpage.errors import TooManyClients


class HoldWatch:
    """Looks at the client's connection itself. The server reads nothing from it while a further request waits there
    (pipelining), so it does not see the end of it; the kernel tells that whatever is still to be read.
    """

    def __init__(self, connection_fd: int | None, lifeline_fd: int) -> None:
        """Neither is owned. None: a client that is no socket. Raises `TooManyClients` when no descriptor is left."""
        self._lifeline_fd = lifeline_fd
        try:
            self._epoll = select.epoll()
        except OSError as error:
            raise TooManyClients(f"a hold needs a descriptor more than the server has: {error.strerror}") from error
        self._epoll.register(lifeline_fd, 0)  # EPOLLERR, which is told always: nobody reads from the pipe any more
        if connection_fd is not None:
            self._epoll.register(connection_fd, select.EPOLLRDHUP)
        self._ended = asyncio.Event()
        self.memory_is_lost = False

    async def ended(self) -> None:
        """Return when the client has gone or the memory is lost. Inside `with`."""
        await self._ended.wait()

    def close(self) -> None:
        """May be called twice."""
        if not self._epoll.closed:
            asyncio.get_running_loop().remove_reader(self._epoll.fileno())
            self._epoll.close()

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self) -> None:
        self.memory_is_lost = self._lifeline_fd in [fd for fd, _ in self._epoll.poll(0)]
        self.close()
        self._ended.set()
