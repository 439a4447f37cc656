"""A client is good for more requests than it may have connections."""

from __future__ import annotations

from pathlib import Path

from support.api_service import ApiService

MORE_THAN_CONNECTIONS = 250


def test_connections_are_used_again(no_leaks: None, run_dir: Path) -> None:
    with ApiService(run_dir) as service, service.client() as client:
        before = service.num_fds()
        for _ in range(MORE_THAN_CONNECTIONS):
            client.devices()
        assert service.num_fds() <= before + 1
        service.terminate()
