"""`kvpage events`: what comes and goes, as it does; after restarts too; until it is told to stop."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import kvpage
from kvpage.cli.events import _Standing
from kvpage.client.block_resources import MissedEvents, PoolEvent
from kvpage.client.events import Event
from kvpage.exit_status import DONE, FAILED, INTERRUPTED, TERMINATED, TRY_AGAIN, WRONG_INPUT
from support.api_service import ApiService
from support.command_line import COMMAND, run_here
from support.leaks import leak_guard
from support.leased_pools import LAYERS, content

REQUEST = {
    "layers": LAYERS["three"], "strategy": "nested", "allocator": "slabs", "num_blocks": 64, "max_model_len": 16,
    "max_num_batched_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Iterator[ApiService]:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB") as service, service.client() as client:
            client.create_pool(REQUEST, name="mimo")
            yield service


@pytest.fixture
def where(service: ApiService) -> tuple[str, str]:
    return ("--run-dir", str(service.run_directory.path))


@contextmanager
def following(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program of its own, which has printed its first line."""
    with subprocess.Popen(
        [*COMMAND, "events", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def next_event(program: subprocess.Popen[str]) -> dict[str, Any]:
    assert program.stdout is not None
    event: dict[str, Any] = json.loads(program.stdout.readline())
    return event


def test_a_pool_is_told_in_a_line_that_people_read(where: tuple[str, str]) -> None:
    done = run_here("events", "--count", "1", *where)
    assert (done.returncode, done.stderr) == (DONE, "")
    assert done.stdout.split()[1] == "pool"
    assert done.stdout.endswith(" mimo on host: ready\n")


def test_with_changes_only_what_is_new_is_told(service: ApiService, where: tuple[str, str]) -> None:
    """The state that a pool has when it begins is none, and its next one is."""
    waiting = ("--pool", "mimo", "--kind", "pool", "--changes", "--count", "1", "--timeout", "1.5")
    done = run_here("events", *waiting, *where)
    assert (done.returncode, done.stdout, done.stderr) == (TRY_AGAIN, "", "")
    with (
        service.client() as client,
        following("--kind", "pool", "--changes", "--count", "1", "--json", *where) as program,
    ):
        while program.poll() is None:  # again and again: nobody tells when it has begun
            client.delete_pool(client.create_pool(REQUEST, name="new").id)
        assert next_event(program)["data"]["name"] == "new"
        assert program.returncode == DONE


def test_changes_and_an_event_to_go_on_after_exclude_each_other(where: tuple[str, str]) -> None:
    done = run_here("events", "--changes", "--since", "x", *where)
    assert done.returncode == WRONG_INPUT
    assert "--changes" in done.stderr


@pytest.mark.parametrize(("then", "is_old"), [("ready", True), ("deleting", False)])
def test_only_the_state_that_was_there_is_old_and_only_once(then: Literal["ready", "deleting"], is_old: bool) -> None:
    standing = _Standing([SimpleNamespace(id="pool-1", state="ready")])  # type: ignore[list-item]
    data = PoolEvent(pool_id="pool-1", name="mimo", device="host", state=then)
    event = Event(kind="pool", data=data, id="x")
    assert [standing.has(event), standing.has(event)] == [is_old, False]
    assert not standing.has(Event(kind="missed", data=MissedEvents(pool_id="pool-1"), id="y"))


def test_contents_are_told_as_json_and_one_goes_on_after_an_event(where: tuple[str, str]) -> None:
    with following("--pool", "mimo", "--json", *where) as program:
        first = next_event(program)
        assert (first["kind"], first["data"]["state"]) == ("pool", "ready")
        with kvpage.open_lease("mimo", name="engine-0", run_dir=where[1]) as lease:
            ids = lease.allocate(1, 2)
            lease.commit(1, ids, [content(1), content(2)])
        stored = next_event(program)
        assert stored["kind"] == "stored"
        assert stored["data"]["hashes"][0] == content(1).hex()
        program.send_signal(signal.SIGTERM)
        out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (TERMINATED, "", "")
    again = run_here("events", "--kind", "stored", "--last-event-id", first["id"], "--count", "1", "--json", *where)
    assert json.loads(again.stdout)["data"]["hashes"] == stored["data"]["hashes"]
    shown = run_here("events", "--kind", "stored", "--since", first["id"], "--count", "1", *where)
    assert f"group 1: {content(1).hex()[:12]}, {content(2).hex()[:12]}\n" in shown.stdout


def test_time_that_is_over_ends_it(where: tuple[str, str]) -> None:
    """Also where nothing happens. It is a failure only for who waits for a number of events."""
    done = run_here("events", "--kind", "missed", "--timeout", "0.3", *where)
    assert (done.returncode, done.stdout, done.stderr) == (DONE, "", "")
    done = run_here("events", "--kind", "missed", "--timeout", "0.3", "--count", "1", *where)
    assert (done.returncode, done.stdout, done.stderr) == (TRY_AGAIN, "", "")


def test_ctrl_c_ends_it_without_a_word(where: tuple[str, str]) -> None:
    with following("--json", *where) as program:
        next_event(program)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert (program.returncode, out, err) == (INTERRUPTED, "", "")


def test_a_reader_that_goes_away_ends_it_without_a_word_and_without_another_event(where: tuple[str, str]) -> None:
    with following("--json", *where) as program:
        next_event(program)
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait(60) == FAILED


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["--pool", "nobody"], FAILED, "pool-not-found"),
        (["--kind", "stord"], 2, "spec-invalid"),
        (["--last-event-id", "x"], 2, "spec-invalid"),
        (["--count", "0"], 2, "usage"),
    ],
)
def test_a_mistake_is_one_clear_error(where: tuple[str, str], arguments: list[str], status: int, code: str) -> None:
    done = run_here("events", *arguments, "--json", *where)
    assert (done.returncode, done.stdout) == (status, "")
    assert json.loads(done.stderr)["code"] == code


def test_without_a_service_it_ends_at_once(tmp_path: Path) -> None:
    done = run_here("events", "--run-dir", str(tmp_path))
    assert done.returncode == TRY_AGAIN
    assert "kvpage serve" in done.stderr


@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "JSON"])
def test_a_restart_of_the_service_is_said_and_lived_through(as_json: bool) -> None:
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB", "--leave-workers") as service, service.client() as client:
            pool = client.create_pool(REQUEST, name="mimo")
            options = ("--json",) if as_json else ()
            with following("--pool", "mimo", *options, "--run-dir", folder) as program:
                assert program.stdout is not None
                assert program.stderr is not None
                program.stdout.readline()
                service.terminate()
                lost = program.stderr.readline()
                with ApiService(Path(folder), "--memory", "64MiB") as again, again.client() as client_again:
                    program.stdout.readline()  # each pool is told anew, so it reads again
                    client_again.delete_pool(pool.id)
                    out, err = program.communicate(timeout=60)
    assert program.returncode == DONE, err
    assert "deleted" in out.splitlines()[-1]
    if as_json:
        told = json.loads(lost)
        assert (told["code"], told["retryable"], err) == ("device-unavailable", True, "")
    else:
        assert lost.startswith("lost the service, trying again: ")
        assert err == "the service answers again; events go on\n"
