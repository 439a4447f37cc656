"""Waiting for a pool: what is shown on a terminal, what elsewhere, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpage.exit_status import DONE, FAILED, INTERRUPTED, TRY_AGAIN
from support.command_line import COMMAND, run_here
from support.eventually import until
from support.plan_requests import small_request
from support.screen import Screen
from support.stand_in_service import Asked, StandInService

SIZE_BYTES = 64 << 30
LONGEST_LOOK_S = 1.0
"""Who shows no progress asks for 30 s, and a quarter comes with each answer."""
POOL_ID = "pool-0123456789abcdef"


def pool_told(state: str, committed_bytes: int = 0, **others: Any) -> dict[str, Any]:
    return {
        "id": POOL_ID, "name": "mimo", "device": "host", "state": state, "plan_id": "sha256:00", "epoch": "0",
        "buffer_size_bytes": SIZE_BYTES, "committed_bytes": committed_bytes, "num_holders": 0, "holders": [], **others,
    }  # fmt: skip


class Committing(StandInService):
    """A pool that gets a quarter of its memory with every look at it, or none, and is ready in the end, or fails."""

    def __init__(self, run_dir: Path, *, quarters: int = 1, end: str = "ready", **others: Any) -> None:
        self.quarters, self._step, self._end, self._others = 0, quarters, end, others
        super().__init__(run_dir, self._told)

    def _told(self, asked: Asked) -> tuple[int, object]:
        if asked.method == "POST":
            return 202, pool_told("creating")
        if self.quarters + self._step < 4:
            self.wait(min(asked.wait_s, LONGEST_LOOK_S))
        self.quarters += self._step
        if self.quarters >= 4:
            return 200, pool_told(self._end, SIZE_BYTES, **self._others)
        return 200, pool_told("creating", SIZE_BYTES // 4 * self.quarters)


@pytest.fixture
def create(run_dir: Path, tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(small_request()))
    return ("pools", "create", str(path), "--name", "mimo", "--run-dir", str(run_dir))


def test_a_terminal_shows_how_much_is_committed_and_how_fast(create: tuple[str, ...], run_dir: Path) -> None:
    with Committing(run_dir), Screen(*create) as screen:
        assert screen.ended() == DONE
    assert "committing mimo" in screen.all
    assert "16 GiB of 64 GiB" in screen.all
    assert re.search(r"(32|48) GiB of 64 GiB, [\d.]+ [MG]iB/s", screen.all), screen.all
    assert screen.all.index("committing") < screen.all.index("state      ready")


def test_what_is_ready_at_once_needs_no_bar(create: tuple[str, ...], run_dir: Path) -> None:
    with Committing(run_dir, quarters=4), Screen(*create) as screen:
        assert screen.ended() == DONE
    assert "state      ready" in screen.all
    assert "committing" not in screen.all


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_who_wants_no_progress_gets_none_on_a_terminal(create: tuple[str, ...], run_dir: Path, option: str) -> None:
    with Committing(run_dir, quarters=2), Screen(*create, option) as screen:
        assert screen.ended() == DONE
    assert "ready" in screen.all
    assert "committing" not in screen.all


def test_elsewhere_nothing_is_shown_and_the_service_is_asked_seldom(create: tuple[str, ...], run_dir: Path) -> None:
    with Committing(run_dir, quarters=4) as service:
        done = run_here(*create)
    assert (done.returncode, done.stderr) == (DONE, "")
    assert [asked.wait_s for asked in service.asked] == [0, 30]


def test_the_time_to_wait_bounds_it_and_the_status_says_try_again(create: tuple[str, ...], run_dir: Path) -> None:
    with Committing(run_dir, quarters=0) as service:
        done = run_here(*create, "--wait", "0.05", "--json")
        assert done.returncode == TRY_AGAIN
        assert json.loads(done.stdout)["state"] == "creating"
        assert done.stderr == ""
        assert 0 < service.asked[1].wait_s <= 0.05


def test_who_does_not_wait_asks_once(create: tuple[str, ...], run_dir: Path) -> None:
    with Committing(run_dir, quarters=0) as service:
        done = run_here(*create, "--no-wait", "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (DONE, "creating")
    assert len(service.asked) == 1


def test_a_pool_that_fails_meanwhile_is_an_error_with_its_reason(create: tuple[str, ...], run_dir: Path) -> None:
    reason = {"code": "not-enough-memory", "message": "the device has 1 byte", "details": {"available_bytes": 1}}
    with Committing(run_dir, quarters=2, end="failed", error=reason):
        done = run_here(*create, "--json")
    assert (done.returncode, done.stdout) == (FAILED, "")
    assert json.loads(done.stderr) == reason | {"retryable": False}


def test_ctrl_c_says_what_goes_on_and_how_to_look(create: tuple[str, ...], run_dir: Path) -> None:
    with Committing(run_dir, quarters=0), Screen(*create) as screen:
        screen.wait_for("committing mimo")
        assert screen.interrupt() == INTERRUPTED
        shown = " ".join(screen.all.split())
        assert "the service goes on committing mimo" in shown
        assert f"kvpage pools show {POOL_ID}" in shown
        assert "Traceback" not in shown


def test_ctrl_c_is_told_as_json_too(create: tuple[str, ...], run_dir: Path) -> None:
    with Committing(run_dir, quarters=0) as service:
        waiting = subprocess.Popen(
            [*COMMAND, *create, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until(lambda: len(service.asked) == 2)
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (INTERRUPTED, "")
    told = json.loads(err)
    assert (told["code"], told["details"], told["retryable"]) == ("interrupted", {"pool_id": POOL_ID}, True)


# --- deleting ---------------------------------------------------------------------------------------------------------

HOLDERS = [{"pid": 4242, "uid": 0, "client_name": "vllm"}]


class Held(StandInService):
    """A pool whose holders let go after so many looks at it."""

    def __init__(self, run_dir: Path, looks: int) -> None:
        self._left = looks
        super().__init__(run_dir, self._told)

    def _told(self, asked: Asked) -> tuple[int, object]:
        if asked.method == "GET":
            return 200, pool_told("ready")
        self._left -= 1
        if self._left >= 0:
            self.wait(min(asked.wait_s, LONGEST_LOOK_S))
            return 409, {"code": "conflict", "detail": "it is held by vllm", "details": {"holders": HOLDERS}}
        return 204, None


def test_deleting_says_on_a_terminal_for_whom_it_waits(run_dir: Path) -> None:
    with (
        Held(run_dir, looks=2),
        Screen("pools", "delete", POOL_ID, "--wait", "60", "--run-dir", str(run_dir)) as screen,
    ):
        assert screen.ended() == DONE
    assert "waiting for vllm (pid 4242) of mimo" in screen.all
    assert f"deleted mimo ({POOL_ID}) on host" in screen.all


def test_an_interrupted_deletion_says_that_the_pool_stays(run_dir: Path) -> None:
    where = ("--run-dir", str(run_dir))
    with Held(run_dir, looks=10**6), Screen("pools", "delete", POOL_ID, "--wait", "60", *where) as screen:
        screen.wait_for("waiting for")
        assert screen.interrupt() == INTERRUPTED
        assert "stays, unless its holders let go" in " ".join(screen.all.split())


def test_deleting_elsewhere_says_nothing_meanwhile_and_an_object_at_the_end(run_dir: Path) -> None:
    with Held(run_dir, looks=0) as service:
        done = run_here("pools", "delete", POOL_ID, "--wait", "5", "--json", "--run-dir", str(run_dir))
    assert (done.returncode, done.stderr) == (DONE, "")
    assert json.loads(done.stdout) == {"id": POOL_ID, "name": "mimo", "device": "host", "forgotten": None}
    assert 4 < service.asked[-1].wait_s <= 5


def test_holders_that_stay_are_a_conflict_with_their_names(run_dir: Path) -> None:
    with Held(run_dir, looks=10**6):
        done = run_here("pools", "delete", POOL_ID, "--wait", "0.05", "--json", "--run-dir", str(run_dir))
    assert done.returncode == FAILED
    assert json.loads(done.stderr)["details"]["holders"] == HOLDERS
    assert done.stdout == ""
