"""`kvpage health`: what health checks of containers run, every few seconds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvpage.cli.health import parse
from kvpage.run_directory import API_SOCKET
from support.api_service import ApiService
from support.command_line import run_here
from support.stand_in_service import StandInService

SLOW_TO_IMPORT = {"typer", "rich", "httpx", "msgspec", "numpy", "pydantic", "ssl", "http", "asyncio"}


def test_a_service_that_is_ready(run_dir: Path) -> None:
    token_file = run_dir.with_name(run_dir.name + ".token")
    where = ("--run-dir", str(run_dir))
    token_file.write_text("t" * 32)
    token_file.chmod(0o600)
    try:
        with ApiService(run_dir, "--port", "0", "--token-file", str(token_file)) as service:
            ready, live = run_here("health", *where), run_here("health", "--live", *where)
            told = run_here("health", "--json", *where)
            over_tcp = run_here("health", "--url", service.url, "--token-file", str(token_file))
            by_environment = run_here("health", KVPAGE_URL=service.url)
            wrong_token = run_here("health", "--url", service.url, "--token-file", __file__)
    finally:
        token_file.unlink()
    assert [(done.returncode, done.stdout) for done in (ready, live, over_tcp, by_environment)] == [
        (0, "ready\n"), (0, "ok\n"), (0, "ready\n"), (0, "ready\n"),
    ]  # fmt: skip
    assert json.loads(told.stdout)["status"] == "ready"
    assert {"name": "worker:host", "ok": True} in [
        {"name": check["name"], "ok": check["ok"]} for check in json.loads(told.stdout)["checks"]
    ]
    assert wrong_token.returncode == 2
    assert "token file" in wrong_token.stderr


NOT_READY = {"status": "not-ready", "checks": [{"name": "worker:host", "ok": False, "detail": "no \x1b[2J worker"}]}


def test_a_service_that_is_not_ready_says_what_is_missing(run_dir: Path) -> None:
    with StandInService(run_dir, lambda _: (503, NOT_READY)):
        done, told = (run_here("health", *options, "--run-dir", str(run_dir)) for options in ((), ("--json",)))
    assert (done.returncode, done.stdout) == (1, "not-ready\n  worker:host: no \\x1b[2J worker\n")
    assert (told.returncode, json.loads(told.stdout)) == (1, NOT_READY)


def test_nobody_there_is_a_failure_and_no_traceback(run_dir: Path) -> None:
    done, told = (run_here("health", *options, "--run-dir", str(run_dir)) for options in ((), ("--json",)))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error device-unavailable: no kvpage server answers at {run_dir}/kvpage.sock: ")
    assert json.loads(told.stderr)["code"] == "device-unavailable"
    assert run_here("health", "--url", "http://127.0.0.1:1").returncode == 1


def test_one_who_takes_the_connection_and_says_nothing_is_given_up_in_time(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        run_dir.mkdir(exist_ok=True)
        listener.bind(str(run_dir / API_SOCKET))
        listener.listen()
        done = run_here("health", "--timeout", "0.05", "--run-dir", str(run_dir))
    (run_dir / API_SOCKET).unlink()
    assert done.returncode == 1
    assert "did not answer within 0.05 s" in done.stderr


def answered(body: bytes, status: bytes = b"200") -> bytes:
    return b"HTTP/1.1 " + status + b" OK\r\n\r\n" + body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.x 200 OK\r\n\r\n{}",
        answered(b'{"status": "ready"}', status=b"9" * 5000),
        answered(b'{"status": "ready"}', status=b"099"),
        answered(b"{}"),
        answered(b"[1]"),
        answered(b'{"a":' * 100_000),
        answered(b"\xff"),
        answered(b'{"status": "ready", "checks": 5}'),
        answered(b'{"status": "ready", "checks": null}'),
        answered(b'{"status": "ready", "checks": "abc"}'),
        answered(b'{"status": "ready", "n": NaN}'),
        answered(b'{"status": "ready", "n": -Infinity}'),
        answered(b'{"status": "ready", "n": 1e999}'),
        answered(b'{"status": "ready", "n": ' + b"9" * 10_000 + b"}"),
        answered(b'{"status": "ready", "status": "no"}'),
        answered(b'{"status": "re\\ud800ady"}'),
        answered(b'{"status": 5}'),
    ],
    ids=lambda answer: ascii(answer[9:60]),
)
def test_an_answer_that_is_none_of_kvpage(run_dir: Path, answer: bytes) -> None:
    with StandInService(run_dir, lambda _: (200, answer)):
        done, told = (run_here("health", *options, "--run-dir", str(run_dir)) for options in ((), ("--json",)))
    assert (done.returncode, done.stdout, told.returncode, told.stdout) == (1, "", 1, "")
    assert done.stderr.startswith("error protocol-error: ")
    assert json.loads(told.stderr)["code"] == "protocol-error"
    assert len(done.stderr) < 1000


def test_checks_that_are_none_are_left_out_for_people(run_dir: Path) -> None:
    told = {"status": "ready", "checks": [1, None, {"ok": 0}, {"name": 5, "ok": 0, "detail": []}]}
    with StandInService(run_dir, lambda _: (200, told)):
        done = run_here("health", "--run-dir", str(run_dir))
    assert (done.returncode, done.stdout) == (0, "ready\n  None: not so\n  5: not so\n")


def test_a_refusal_is_told_as_such(run_dir: Path) -> None:
    with StandInService(run_dir, lambda _: (401, {"code": "unauthorized", "detail": "no token", "status": 401})):
        done = run_here("health", "--run-dir", str(run_dir))
    assert (done.returncode, done.stderr) == (1, "error unauthorized: no token\n")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--timeout"], ["--timeout", "x"], ["--timeout", "0"], ["--timeout", "nan"], ["--live=1"], ["x"],
     ["--run-dir", "a", "--url", "http://b"]],
)  # fmt: skip
def test_what_is_no_plain_probe_is_left_to_the_full_command_line(arguments: list[str]) -> None:
    assert parse(arguments) is None
    done = run_here("health", *arguments)
    assert done.returncode == (0 if arguments == ["--help"] else 2)
    assert "Traceback" not in done.stderr


def test_it_loads_nothing_that_takes_long(run_dir: Path) -> None:
    program = (
        "import sys; from kvpage.cli import main; sys.argv = ['kvpage', 'health', '--run-dir', sys.argv[1]]\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run_dir)], capture_output=True, text=True, check=False, timeout=60
    )
    status, *loaded = done.stdout.split()
    assert status == "1"
    assert "socket" in loaded
    assert SLOW_TO_IMPORT.isdisjoint(loaded)
