"""A connection to a worker for one who waits long: it takes a descriptor, and no thread."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Self, TypeVar

from kvpage.errors import ProtocolError, WorkerLost
from kvpage.wire import messages
from kvpage.wire.channel import MAX_FRAME_BYTES, header
from kvpage.wire.connecting import connect

ANSWER_S = 10.0
"""How long the worker may take, besides what it was asked to wait."""

_HEADER_BYTES = 8
_Body = TypeVar("_Body", bound=messages.Body)


class AsyncWorker:
    """Role `api`, for requests whose answers bring no descriptors. One request at a time. Closing it ends the wait at
    the worker too.
    """

    def __init__(self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._path, self._reader, self._writer = path, reader, writer
        self._ids = itertools.count(1)

    @classmethod
    async def open(cls, path: Path) -> Self:
        """Raises as `connecting.connect`, also when the queue of the listener is full; and what the worker refuses
        with."""
        sock = connect(path, 0.0)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=sock)
        except BaseException:
            sock.close()
            raise
        worker = cls(path, reader, writer)
        try:
            hello = messages.Hello(version=messages.PROTOCOL_VERSION, role="api", client_name="kvpage serve")
            await worker.ask(hello, messages.Welcome)
        except BaseException:
            worker.close()
            raise
        return worker

    def close(self) -> None:
        """May be called twice."""
        self._writer.transport.abort()

    async def ask(self, body: messages.RequestBody, kind: type[_Body], *, wait_s: float = 0.0) -> _Body:
        """`wait_s`: how long the worker was asked to wait.

        Raises the error the worker answered with, and `WorkerLost` when the connection has ended or no answer came.
        """
        request_id = next(self._ids)
        payload = messages.encode(messages.RequestFrame(id=request_id, body=body))
        try:
            async with asyncio.timeout(ANSWER_S + wait_s):
                self._writer.write(header(len(payload), 0) + payload)
                await self._writer.drain()
                reply = messages.decode_reply(await self._receive())
        except TimeoutError as error:
            raise WorkerLost(f"the worker at {self._path} did not answer in time") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerLost(f"the worker at {self._path} has ended the connection") from error
        if reply.error is not None:
            raise reply.error.to_error()
        if reply.id != request_id or not isinstance(reply.body, kind):
            raise ProtocolError(
                f"the worker answered {type(body).__name__} {request_id} with {type(reply.body).__name__} {reply.id}"
            )
        return reply.body

    async def _receive(self) -> bytes:
        head = await self._reader.readexactly(_HEADER_BYTES)
        length = int.from_bytes(head[:4], "little")
        if not 0 < length <= MAX_FRAME_BYTES or any(head[4:]):
            raise ProtocolError(f"the worker sent a frame of {length} bytes and header {head.hex()}")
        return await self._reader.readexactly(length)
