"""`kvpage serve`: the API process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kvpage.errors import Conflict, KvpageError
from kvpage.memory.cuda import probe
from kvpage_server.app import create_app
from kvpage_server.audit_file import AuditFile
from kvpage_server.configured import from_command_line
from kvpage_server.intake import Intake
from kvpage_server.listeners import Listeners
from kvpage_server.logs import configure_logging
from kvpage_server.peer_protocol import PeerAwareProtocol
from kvpage_server.services import Services
from kvpage_server.settings import Settings
from kvpage_server.standard_error import flush_lines, write_line
from kvpage_server.start_errors import exit_status, report
from kvpage_server.tls import Securing
from kvpage_server.tls_files import TlsContext
from kvpage_server.worker_limits import raise_fd_limit

GRACE_S = 10
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that plans goes on before the event loop, which has something to do, gets the interpreter back. It
waits that long at every call that lets go of it, some times for each request: with Python's 5 ms a thousand requests at
once took the process twice as long.
"""
KEEP_ALIVE_S = 60  # longer than clients keep idle connections, so that they never use one we are closing
logger = logging.getLogger("kvpage.api")


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM, SIGHUP or SIGINT, which then also ends the process. Returns 2 for wrong settings, 1 when
    it could not start.
    """
    try:
        settings = from_command_line(arguments, os.environ)
        configure_logging(settings.log_format, settings.log_level)
        serve(settings)
    except (KvpageError, OSError) as error:
        write_line(report("serve", error))
        return exit_status(error)
    except KeyboardInterrupt:  # uvicorn raises SIGINT again when everything is closed
        return 128 + signal.SIGINT
    return 0


def serve(settings: Settings) -> None:
    """Everything that needs the sockets ends in the application's lifespan: uvicorn re-raises the signal after it, so
    no line behind `run` is reached.
    """
    check_startable(settings)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tls = None if settings.tls_files is None else TlsContext(settings.tls_files)
    intake = Intake(settings.intake, raise_fd_limit())  # each pool costs two descriptors here
    listeners = Listeners(settings)
    try:
        app = create_app(settings, on_shutdown=listeners.close)
        server = _Server(_configuration(app, intake), app, None if tls is None else Securing(tls, intake))
        _end_with_terminal(server)
        for address in listeners.addresses:
            logger.info("listening", extra={"address": address})
        server.run(listeners.sockets)
    finally:
        listeners.close()
    if server.is_hung_up:  # uvicorn ends the process by the other signals, not by one it does not know
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGHUP)


def check_startable(settings: Settings) -> None:
    """Raises at once for what no worker could start with; else the supervisor would try again for ever."""
    if settings.audit_log is not None:
        AuditFile(settings.audit_log).close()
    if not settings.external_workers:
        _check_devices([device for device in settings.devices if device != "host"])


def _check_devices(devices: list[str]) -> None:
    """Raises `NotSupported` or `NotFound` for a device that cannot be used, `Conflict` for one that is named twice."""
    names: dict[str, str] = {}
    for device in devices:
        uuid = probe(device).uuid
        if uuid in names:
            raise Conflict(f"devices {names[uuid]} and {device} are the same, {uuid}; name it once")
        names[uuid] = device


def _end_with_terminal(server: uvicorn.Server) -> None:
    """Let SIGHUP end the server as SIGTERM does, unless it was started to outlive its terminal (nohup)."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, server.handle_exit)


class _Server(uvicorn.Server):
    """Tells the application at the signal, before the listeners are closed and requests in flight are waited for.

    With `securing`, what comes over TCP comes over TLS.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, securing: Securing | None = None) -> None:
        super().__init__(config)
        self._app = app
        self._securing = securing
        self.is_hung_up = False
        """SIGHUP asked it to end."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._securing is None or sockets is None:
            await super().startup(sockets)
            return
        await super().startup([sock for sock in sockets if sock.family == socket.AF_UNIX])
        for sock in sockets:
            if sock.family != socket.AF_UNIX:
                self._securing.serve(sock, self._new_protocol)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._securing is not None:
            await self._securing.close()
        await super().shutdown(sockets)

    def _new_protocol(self) -> asyncio.Protocol:
        """As uvicorn makes them for its own sockets."""
        return self.config.http_protocol_class(  # type: ignore[call-arg]  # of ours
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Behind it a captured signal ends the process, which then does nothing more."""
        with super().capture_signals():
            try:
                yield
            finally:
                flush_lines()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server in its order, which takes bounded time. A terminal that is closed, or an
        impatient person, sends more: they must not leave workers behind.
        """
        if self.should_exit:
            return
        services = getattr(self._app.state, "services", None)
        if isinstance(services, Services):
            services.pools.drain()
        self.is_hung_up = sig == signal.SIGHUP
        super().handle_exit(sig, frame)


def _configuration(app: FastAPI, intake: Intake) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(PeerAwareProtocol, intake=intake),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
