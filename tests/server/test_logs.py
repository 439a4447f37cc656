"""The log of the API process: what a line has, what it never has, and what does not end the process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from kvpage.errors import KvpageError
from kvpage.wire.messages import ListPools
from kvpage_server import worker_log
from kvpage_server.logs import WARNINGS_AT_ONCE, SparingWarnings, formatter
from kvpage_server.request_log import SLOW_S, log_request
from kvpage_server.standard_error import MAX_WAITING_LINES
from support.api_service import COMMAND, ApiService
from support.eventually import until
from support.worker_process import WORKER_COMMAND, WorkerProcess

TOKEN = "sesame-0123456789abcdef0123456789abcdef"
SECRET = "Zq7-not-for-the-log"
FIRST = ["time", "level", "event", "logger", "pid"]

LOGS = """
import logging, sys
from kvpage_server.logs import configure_logging
configure_logging(sys.argv[1], sys.argv[2])
logging.getLogger("kvpage.api").info("hello", extra={"device": "host"})
logging.getLogger("kvpage.api").debug("quiet")
"""


def logged(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def answers(service: ApiService) -> bool:
    try:
        with service.client() as client:
            return client.health() is not None
    except KvpageError:
        return False


def line_of(record: logging.LogRecord, *, is_json: bool) -> str:
    return formatter(is_json=is_json).format(record)


def record_of(message: str, *args: object, **more: Any) -> logging.LogRecord:
    record = logging.LogRecord("kvpage.api", logging.WARNING, __file__, 1, message, args, None)
    record.__dict__.update(more)
    return record


# --- a real server ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiService]:
    """Logs every request, takes a token, and has no worker."""
    folder = tmp_path_factory.mktemp("r")
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    options = ["--log-level", "debug", "--external-workers", "--port", "0", "--token-file", str(token_file)]
    with ApiService(folder, *options, wait_ready=False) as service:
        until(lambda: answers(service))
        yield service


def test_every_line_is_json_that_begins_alike_whoever_logs(talkative: ApiService) -> None:
    httpx.get(f"{talkative.url}/livez")
    until(lambda: '"kvpage.request"' in talkative.log().rpartition("\n")[0])
    lines = logged(talkative.log().rpartition("\n")[0])
    assert [list(line)[:5] for line in lines] == [FIRST] * len(lines)
    assert {line["pid"] for line in lines} == {talkative.pid}
    assert {"kvpage.api", "kvpage.request", "uvicorn.error"} <= {line["logger"] for line in lines}


def test_a_request_is_one_line_with_the_id_of_its_answer(talkative: ApiService) -> None:
    with httpx.Client(base_url=talkative.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        named = http.get("/v1/plans/none", headers={"X-Request-ID": "mine.1"})
        unnamed = http.get("/livez")

    def line(answer: httpx.Response) -> dict[str, Any]:
        found = [one for one in logged(talkative.log()) if one.get("request_id") == answer.headers["x-request-id"]]
        assert len(found) == 1
        return found[0]

    until(lambda: talkative.log().endswith("\n") and unnamed.headers["x-request-id"] in talkative.log())
    asked = line(named)
    assert asked["request_id"] == "mine.1"
    kept = ("level", "event", "logger", "method", "path", "status", "peer_address")
    assert [asked[name] for name in kept] == [
        "debug", "request", "kvpage.request", "GET", "/v1/plans/none", 404, "127.0.0.1"
    ]  # fmt: skip
    assert asked["duration_s"] >= 0
    assert line(unnamed)["path"] == "/livez"


def test_no_secret_of_a_request_is_logged(talkative: ApiService) -> None:
    with httpx.Client(base_url=talkative.url) as http:
        for headers in ({"Authorization": f"Bearer {TOKEN}"}, {"Authorization": f"Bearer {SECRET}"}, {"X-Key": SECRET}):
            http.get("/v1/pools", params={"key": SECRET}, headers=headers)
            http.post("/v1/plans", json={"layers": SECRET, SECRET: 1}, headers=headers)
            http.post("/v1/pools", content=SECRET, headers=headers)
        last = http.get("/livez").headers["x-request-id"]
    until(lambda: last in talkative.log())
    assert "/v1/pools" in talkative.log()
    assert TOKEN not in talkative.log()
    assert SECRET not in talkative.log()


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"], ids=["full disk", "closed"])
def test_a_log_that_cannot_be_written_ends_nothing(no_leaks: None, run_dir: Path, stderr: str) -> None:
    command = ["sh", "-c", f'exec "$@" {stderr}', "sh", *COMMAND]
    options = ["--external-workers", "--log-level", "debug"]
    with ApiService(run_dir, *options, wait_ready=False, command=command) as service:
        until(lambda: answers(service))
        assert (run_dir / "kvpage.lock").read_bytes() == b""  # no line went into what was opened first
        assert service.terminate() == -signal.SIGTERM
        assert service.log() == ""


# --- form and level ---------------------------------------------------------------------------------------------------


def lines_of(*arguments: str, terminal: tuple[int, int] | None = None) -> str:
    """What the program logs into a pipe, or on a terminal of which both ends are given."""
    command = [sys.executable, "-c", LOGS, *arguments]
    if terminal is None:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    ours, its = terminal
    subprocess.run(command, stderr=its, check=True, timeout=60, env=os.environ | {"NO_COLOR": "1"})
    return os.read(ours, 65536).decode()


def test_a_terminal_gets_text_and_everything_else_json() -> None:
    terminal = os.openpty()
    text = lines_of("auto", "info", terminal=terminal)
    assert "hello" in text
    assert "device=host" in text
    assert "{" not in text
    [line] = logged(lines_of("json", "info", terminal=terminal))
    for fd in terminal:
        os.close(fd)
    assert (line["event"], line["device"], line["level"]) == ("hello", "host", "info")
    assert [one["event"] for one in logged(lines_of("auto", "debug"))] == ["hello", "quiet"]
    assert "{" not in lines_of("text", "info")
    assert lines_of("json", "error") == ""


def test_the_workers_lines_have_the_same_names(capfd: pytest.CaptureFixture[str]) -> None:
    worker_log.log("started", level="warning", device="host")
    [line] = logged(capfd.readouterr().err)
    assert list(line) == [*FIRST, "device"]
    [other] = logged(line_of(record_of("started", device="host"), is_json=True))
    assert list(other) == list(line)
    assert len(other["time"]) == len(line["time"])
    assert other["level"] == line["level"] == "warning"


def test_a_traceback_is_one_line_of_json_and_shows_no_local_variable() -> None:
    token = SECRET  # noqa: F841  # in the frame that fails
    try:
        raise ValueError("why")
    except ValueError:
        record = record_of("it failed", exc_info=sys.exc_info())
    line = line_of(record, is_json=True)
    assert "\n" not in line
    assert "ValueError: why" in json.loads(line)["exception"]
    text = line_of(record, is_json=False)
    assert "ValueError: why" in text
    assert SECRET not in line + text


def test_no_event_looks_like_two_lines() -> None:
    for is_json in (True, False):
        assert "\n" not in line_of(record_of("from %s", "somebody\n2026 [error] forged"), is_json=is_json)


def test_what_another_handler_left_in_a_record_is_not_repeated() -> None:
    record = record_of("once %s", 1, color_message="twice")
    logging.Formatter("%(asctime)s %(message)s").format(record)
    [line] = logged(line_of(record, is_json=True))
    assert list(line) == FIRST


def test_what_json_does_not_know_is_logged_as_text() -> None:
    [line] = logged(line_of(record_of("odd", path=Path("/x"), text="\udcff"), is_json=True))
    assert "/x" in line["path"]


def test_every_line_of_a_request_has_its_id() -> None:
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        [line] = logged(line_of(record_of("inside"), is_json=True))
    assert list(line) == [*FIRST, "request_id"]
    assert "request_id" not in line_of(record_of("outside"), is_json=True)


# --- which requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "duration_s", "level"),
    [
        ({}, 200, 0.1, "DEBUG"),
        ({}, 404, 0.1, "DEBUG"),
        ({}, 401, 0.1, "DEBUG"),
        ({}, None, 0.1, "DEBUG"),
        ({}, 200, SLOW_S * 2, "INFO"),
        ({"query_string": b"wait=30"}, 200, SLOW_S * 2, "DEBUG"),
        ({"headers": [(b"prefer", b"wait=30")]}, 202, SLOW_S * 2, "DEBUG"),
        ({"path": "/v1/pools/p/leases/l/blocks:batch"}, 200, SLOW_S * 2, "DEBUG"),
        ({"query_string": b"wait=30"}, 503, SLOW_S * 2, "WARNING"),
        ({}, 500, 0.1, "WARNING"),
    ],
)
def test_requests_that_went_wrong_or_were_slow_are_seen_without_debugging(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], status: int | None, duration_s: float, level: str
) -> None:
    scope = {"method": "GET", "path": "/v1/pools", "query_string": b"", "headers": [], "client": ("10.0.0.1", 1)}
    with caplog.at_level(logging.DEBUG, logger="kvpage.request"):
        log_request({**scope, **changes}, status, duration_s)
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == (level, "request")


# --- a reader who stops reading, and strangers ------------------------------------------------------------------------


@contextlib.contextmanager
def stalled_pipe() -> Iterator[int]:
    """The end that is written to, of a pipe as whoever stopped reading leaves it: there is no room for one byte."""
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * select.PIPE_BUF)
    os.set_blocking(full, True)
    try:
        yield full
    finally:
        os.close(unread)
        os.close(full)


def into(fd: int) -> list[str]:
    """Runs what stands behind it with that as standard error."""
    return ["sh", "-c", f'exec "$@" 2>/proc/{os.getpid()}/fd/{fd}', "sh"]


def test_a_server_whose_log_nobody_reads_answers_and_ends_when_asked(no_leaks: None, run_dir: Path) -> None:
    with (
        stalled_pipe() as pipe,
        ApiService(run_dir, "--log-level", "debug", command=[*into(pipe), *COMMAND]) as service,
        service.client() as client,
    ):
        assert client.health() is not None
        assert service.terminate() == -signal.SIGTERM


def test_a_worker_whose_log_nobody_reads_answers_and_ends_when_asked(no_leaks: None, run_dir: Path) -> None:
    with (
        stalled_pipe() as pipe,
        WorkerProcess(run_dir, command=[*into(pipe), *WORKER_COMMAND]) as worker,
    ):
        with worker.client() as client:
            client.request(ListPools())
        assert worker.terminate() == 0


MANY_LINES = """
import sys
from kvpage_server.standard_error import MAX_WAITING_LINES, write_line
for number in range(2 * MAX_WAITING_LINES):
    write_line(str(number))
print("written", flush=True)
sys.stdin.read()
write_line("after")
"""


def test_of_lines_that_nobody_reads_the_first_are_kept_and_a_reader_who_goes_on_gets_new_ones() -> None:
    with stalled_pipe() as pipe, open(f"/proc/self/fd/{pipe}", "wb", buffering=0) as errors:
        unread = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY)
        program = subprocess.Popen(
            [sys.executable, "-c", MANY_LINES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        with program, open(unread, "rb") as reader:
            assert program.stdout is not None
            assert program.stdin is not None
            assert program.stdout.readline() == b"written\n"
            assert reader.readline().endswith(b"x0\n")
            kept = [int(reader.readline()) for _ in range(MAX_WAITING_LINES - 1)]
            assert kept == list(range(1, MAX_WAITING_LINES))
            program.stdin.close()
            last = reader.readline()
            assert last in (b"after\n", b"%d\n" % MAX_WAITING_LINES)  # the thread may have had one in its hands
            assert last == b"after\n" or reader.readline() == b"after\n"
        assert program.returncode == 0


def test_strangers_who_speak_no_http_cannot_fill_the_log(talkative: ApiService) -> None:
    host, port = talkative.url.removeprefix("http://").split(":")
    num_strangers = 10 * int(WARNINGS_AT_ONCE)
    for _ in range(num_strangers):
        with socket.create_connection((host, int(port)), timeout=60) as stranger:
            stranger.sendall(b"x\r\n\r\n")
            assert stranger.recv(9) == b"HTTP/1.1 "
    until(lambda: "Invalid HTTP request" in talkative.log())
    warnings = talkative.log().count("Invalid HTTP request")
    assert 0 < warnings < num_strangers


def test_warnings_that_were_left_out_are_counted_and_errors_never_left_out() -> None:
    now_s = 0.0
    sparing = SparingWarnings(clock_s=lambda: now_s)
    error = record_of("fault")
    error.levelno = logging.ERROR
    passed = [sparing.filter(record_of("odd")) for _ in range(int(WARNINGS_AT_ONCE) + 3)]
    assert passed.count(False) == 3
    assert sparing.filter(error)
    now_s = 1.0
    [later, latest] = [record_of("odd"), record_of("odd")]
    assert sparing.filter(later)
    assert later.__dict__["num_left_out_before"] == 3
    now_s = 2.0
    assert sparing.filter(latest)
    assert "num_left_out_before" not in latest.__dict__
