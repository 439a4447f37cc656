"""Answers on the socket of a run directory what a test says, as a service would: states that a real one leaves too
soon to be looked at, and answers that no real one gives.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

from kvpage.run_directory import API_SOCKET


@dataclass(frozen=True, slots=True)
class Asked:
    method: str
    path: str
    wait_s: float


Answering = Callable[[Asked], tuple[int, object]]
"""Status, and what is told as JSON; or bytes, sent as they are in place of an answer."""


class StandInService:
    def __init__(self, run_dir: Path, answering: Answering) -> None:
        self.asked: list[Asked] = []
        self._ending = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self, answering)

            do_POST = do_DELETE = do_GET  # noqa: N815  # names that http.server looks for

            def log_message(self, *_: object) -> None:
                pass

        run_dir.mkdir(exist_ok=True)
        self._server = _Server(str(run_dir / API_SOCKET), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def wait(self, wait_s: float) -> None:
        """As a service waits for a state that does not come."""
        self._ending.wait(wait_s)

    def _answer(self, handler: BaseHTTPRequestHandler, answering: Answering) -> None:
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        parts = urlsplit(handler.path)
        wait_s = float(parse_qs(parts.query).get("wait", ["0"])[0])
        asked = Asked(handler.command, parts.path, wait_s)
        self.asked.append(asked)
        status, told = answering(asked)
        if isinstance(told, bytes):
            handler.wfile.write(told)
            handler.close_connection = True
            return
        body = b"" if told is None else json.dumps(told).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
        if handler.headers.get("Connection") == "close":
            handler.close_connection = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        Path(str(self._server.server_address)).unlink()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """A client that went away is what some tests are about."""
