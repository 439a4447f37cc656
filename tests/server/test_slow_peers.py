"""Clients that send byte by byte, never finish or never read are closed by their bounds, and others notice nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpage_server.worker_limits import Limits
from support import slow_peers
from support.slow_peers import HASTY, HTTP_KINDS, slow_http_clients, slow_worker_clients


def test_slow_clients_of_the_server_are_closed_while_others_are_served(no_leaks: None) -> None:
    slow_http_clients(num_each=1).require_nothing_lost()


def test_slow_clients_of_a_worker_are_closed_while_others_are_served(no_leaks: None, run_dir: Path) -> None:
    slow_worker_clients(run_dir, num_each=1).require_nothing_lost()


def test_the_check_fires_where_there_are_no_bounds(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_open = {"a body, byte by byte", "chunks, byte by byte"}
    monkeypatch.setattr(slow_peers, "HTTP_KINDS", [kind for kind in HTTP_KINDS if kind.name in left_open])
    tally = slow_http_clients(num_each=1, limits=HASTY | {"body_s": 3600}, patience_s=0.5)
    assert {loss.split(" over ")[0] for loss in tally.losses if " over " in loss} == left_open
    assert any(loss.startswith("the server has") for loss in tally.losses)
    without = Limits(hello_s=3600, stall_s=3600, frame_s=3600)
    assert slow_worker_clients(run_dir, num_each=1, limits=without, patience_s=1).lost > 4
