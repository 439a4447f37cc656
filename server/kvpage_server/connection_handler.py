"""What the connection of a client needs from the rest of the worker."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvpage.wire import leasing, messages

if TYPE_CHECKING:
    from kvpage_server.worker_connection import Connection

Quick: TypeAlias = Callable[["Connection", leasing.TakeStep], leasing.Granted | None]
"""Answers what it can answer at once; None: it has done nothing."""


class Handler(Protocol):
    """Who answers."""

    @property
    def epoch(self) -> str: ...

    def handle(self, connection: Connection, request_id: int, body: messages.RequestBody, fds: list[int]) -> None:
        """Answer with `reply` or `fail`, now or later. Owns `fds`. What it raises becomes the answer."""

    def disconnected(self, connection: Connection) -> None:
        """Called once, whatever ended the connection."""

    def received(self, num_bytes: int) -> None:
        """So many bytes more of requests that are not taken yet wait here; negative for fewer. May close somebody."""

    def dispose(self, sock: socket.socket) -> None:
        """Close a client's socket, without waiting: see `worker_disposal`."""
