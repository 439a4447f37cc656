"""What connections have from the socket they came by."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvpage.run_directory import RunDirectory
from kvpage_server.listeners import Listeners
from kvpage_server.settings import Settings


def test_a_peer_that_vanishes_from_the_network_is_noticed_within_two_minutes(no_leaks: None, run_dir: Path) -> None:
    """An idle connection by probes, one with something on its way by how long that may take."""
    listeners = Listeners(Settings(run_directory=RunDirectory(run_dir), port=0))
    try:
        [_, tcp] = listeners.sockets
        with socket.create_connection(tcp.getsockname()), tcp.accept()[0] as accepted:
            idle, between, count = (
                accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert idle + between * count == pytest.approx(120)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
    finally:
        listeners.close()
