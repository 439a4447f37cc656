"""Clients that vanish in any phase of a request leave nothing behind, and others notice nothing."""

from __future__ import annotations

import pytest

from support import vanishing_peers
from support.attacked_service import faults_in
from support.vanishing_peers import killed_clients, vanishing_clients


def test_a_connection_may_end_in_every_phase_of_a_request(no_leaks: None) -> None:
    vanishing_clients(num_each=1).require_nothing_lost()


@pytest.mark.long
def test_a_stopped_process_keeps_what_it_holds_until_it_is_killed(no_leaks: None) -> None:
    killed_clients(num_each=1).require_nothing_lost()


def test_the_check_fires_for_what_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(vanishing_peers, "WAYS", ("closed",))
    monkeypatch.setattr(vanishing_peers, "PHASES", ("reading events", "holding a pool"))
    monkeypatch.setattr(vanishing_peers, "_vanish", lambda sock, way: kept.append(sock))
    monkeypatch.setattr(vanishing_peers, "PATIENCE_S", 0.5)
    tally = vanishing_clients(num_each=3)
    for sock in kept:
        sock.close()
    assert any(loss.startswith("the server has") and "descriptors more" in loss for loss in tally.losses)


@pytest.mark.parametrize(
    "line",
    [
        "ERROR:uvicorn: Exception in ASGI application",
        "Traceback (most recent call last):",
        '{"level": "error", "event": "x"}',
    ],
)
def test_the_check_fires_for_faults_in_a_log(line: str) -> None:
    assert list(faults_in(f"INFO all is well\n{line}\n")) == [f"in the log: {line}"]
    assert list(faults_in('INFO all is well\n{"level": "warning", "event": "no error"}')) == []
