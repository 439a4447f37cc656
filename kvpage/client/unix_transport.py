"""HTTP over a Unix socket.

Unlike httpx's own transports these load no certificates, which takes 30 ms, close their socket when nobody listens, and
go on trying while the listener's queue is full: a Unix socket refuses then at once, with EAGAIN.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator

import httpcore
import httpx

_PAUSE_S = 0.002  # nobody tells when a place in the listener's queue is free
_LONGEST_S = 30.0  # without a timeout
_MAX_CONNECTIONS, _KEEPALIVE_S = 100, 5.0


class UnixTransport(httpx.BaseTransport):
    def __init__(self, path: str) -> None:
        self._pool = httpcore.ConnectionPool(
            uds=path,
            network_backend=_UnixBackend(),
            max_connections=_MAX_CONNECTIONS,
            keepalive_expiry=_KEEPALIVE_S,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with _as_httpx_errors():
            answer = self._pool.handle_request(_to_httpcore(request))
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Stream(answer), extensions=answer.extensions
        )

    def close(self) -> None:
        self._pool.close()


class AsyncUnixTransport(httpx.AsyncBaseTransport):
    def __init__(self, path: str) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            uds=path,
            network_backend=_AsyncUnixBackend(),
            max_connections=_MAX_CONNECTIONS,
            keepalive_expiry=_KEEPALIVE_S,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _as_httpx_errors():
            answer = await self._pool.handle_async_request(_to_httpcore(request))
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_AsyncStream(answer), extensions=answer.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


def _to_httpcore(request: httpx.Request) -> httpcore.Request:
    url = request.url
    return httpcore.Request(
        request.method,
        httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
        headers=request.headers.raw,
        content=request.content,  # in memory: these clients send nothing else
        extensions=request.extensions,
    )


class _Stream(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx_errors():
            yield from self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()  # else its connection stays taken


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx_errors():
            async for part in self._answer.aiter_stream():
                yield part

    async def aclose(self) -> None:
        await self._answer.aclose()


class _UnixBackend(httpcore.SyncBackend):
    """Its parent leaves its socket open when nobody listens."""

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        deadline_s = time.monotonic() + (_LONGEST_S if timeout is None else timeout)
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(_new_socket())
            while not _is_taken_in(sock, path, deadline_s):
                self.sleep(_PAUSE_S)
            undo.pop_all()
            return _UnixStream(sock)


class _UnixStream(httpcore.NetworkStream):
    """What httpcore has for this is private."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _as_httpcore_errors(httpcore.ReadTimeout, httpcore.ReadError):
            self._sock.settimeout(timeout)
            return self._sock.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _as_httpcore_errors(httpcore.WriteTimeout, httpcore.WriteError):
            self._sock.settimeout(timeout)
            self._sock.sendall(buffer)

    def close(self) -> None:
        self._sock.close()

    def get_extra_info(self, info: str) -> object:
        """`is_readable`: whether an idle connection has something to read, which is its end."""
        if info != "is_readable":
            return None
        if self._sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))


@contextlib.contextmanager
def _as_httpcore_errors(timed_out: type[Exception], failed: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise timed_out(str(error)) from error
    except OSError as error:
        raise failed(str(error)) from error


class _AsyncUnixBackend(httpcore.AnyIOBackend):
    """As `_UnixBackend`. Its parent would take a full queue for a connection under way, and wait its whole time."""

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        deadline_s = time.monotonic() + (_LONGEST_S if timeout is None else timeout)
        with _new_socket() as probe:
            while not _is_taken_in(probe, path, deadline_s):
                await self.sleep(_PAUSE_S)
        return await super().connect_unix_socket(path, timeout, socket_options)


def _new_socket() -> socket.socket:
    """Raises `httpcore.ConnectError` when there is no descriptor left."""
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore.ConnectError(error) from error


def _is_taken_in(sock: socket.socket, path: str, deadline_s: float) -> bool:
    """Connects `sock`: whether the queue of the listener at `path` had a place. Raises `httpcore.ConnectError` when
    there is no listener, or no place at the end of time.
    """
    try:
        sock.setblocking(False)
        sock.connect(path)
    except BlockingIOError as error:
        if time.monotonic() >= deadline_s:
            raise httpcore.ConnectError(error) from error
        return False
    except OSError as error:
        raise httpcore.ConnectError(error) from error
    return True


@contextlib.contextmanager
def _as_httpx_errors() -> Iterator[None]:
    try:
        yield
    except httpcore.ConnectError as error:
        raise httpx.ConnectError(str(error)) from error
    except httpcore.TimeoutException as error:
        raise httpx.ReadTimeout(str(error)) from error
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise httpx.ReadError(str(error)) from error
