"""Starting a worker: what it needs, what it does without, and how the reason of a failure reaches whoever asked."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpage.errors import PermissionDenied
from kvpage.run_directory import RunDirectory
from kvpage_server.device_process import WatchedProcess, last_line_of
from kvpage_server.settings import Settings
from kvpage_server.worker_log import MAX_LOG_BYTES, StartReport, open_log
from support.api_service import run_refused
from support.worker_process import WORKER_COMMAND, WorkerProcess, run_refused_worker

pytestmark = pytest.mark.usefixtures("no_leaks")

FULL_DISK = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *WORKER_COMMAND]
"""No file can grow: neither the lock file nor the log."""


def lock(run_dir: Path) -> int:
    fd = os.open(RunDirectory(run_dir).worker_lock("host"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


# --- without a disk --------------------------------------------------------------------------------------------------


def test_a_worker_starts_and_ends_where_no_file_can_grow(run_dir: Path) -> None:
    with WorkerProcess(run_dir, command=FULL_DISK) as worker:
        with worker.client() as client:
            assert client.welcome.worker_pid == worker.pid
        assert RunDirectory(run_dir).worker_lock("host").read_bytes() == b""
        assert worker.terminate() == 0
        assert worker.log() == ""


def test_the_reason_of_a_failed_start_needs_no_file(run_dir: Path) -> None:
    held = lock(run_dir)
    ready_out, ready_in = os.pipe()
    command = [*FULL_DISK, "--device", "host", "--run-dir", str(run_dir), "--ready-fd", str(ready_in)]
    with (run_dir / "log").open("wb") as log:
        child = subprocess.Popen(command, pass_fds=[ready_in], stdin=subprocess.DEVNULL, stderr=log)
    os.close(ready_in)
    with child, open(ready_out, "rb") as ready:
        assert f"(pid {os.getpid()}) already serves device host" in ready.read().decode()
    assert child.returncode == 1
    assert (run_dir / "log").read_bytes() == b""
    os.close(held)


@pytest.mark.anyio
async def test_and_reaches_the_server(run_dir: Path) -> None:
    held = lock(run_dir)
    process = WatchedProcess.start(Settings(run_directory=RunDirectory(run_dir)), "host")
    why_not = await process.wait_ready()
    assert why_not is not None
    assert f"(pid {os.getpid()}) already serves device host" in why_not
    assert process.exit_status == 1
    process.close()
    os.close(held)


@pytest.mark.anyio
async def test_a_worker_that_is_killed_while_it_starts_gives_no_reason(run_dir: Path) -> None:
    process = WatchedProcess.start(Settings(run_directory=RunDirectory(run_dir)), "host")
    os.kill(process.pid, 9)
    assert await process.wait_ready() == ""
    assert process.exit_status == -9
    process.close()


def test_a_start_is_reported_once_on_one_line() -> None:
    ready_out, ready_in = os.pipe()
    report = StartReport(ready_in)
    report.tell("two\nlines " + "x" * 10_000)
    report.tell("ready")
    with open(ready_out, "rb") as ready:
        [line] = ready.readlines()
    assert line.startswith(b"two lines x")
    assert len(line) == 4096
    StartReport(None).tell("nobody asked")


# --- the log ---------------------------------------------------------------------------------------------------------


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.anyio
@pytest.mark.parametrize("make", [make_fifo, make_link, make_folder])
async def test_only_a_regular_file_is_a_log(run_dir: Path, make: Callable[[Path], None]) -> None:
    path = RunDirectory(run_dir).worker_log("host")
    make(path)
    with pytest.raises(PermissionDenied, match="not a regular file"):
        WatchedProcess.start(Settings(run_directory=RunDirectory(run_dir)), "host")
    assert last_line_of(path) == "(none)"  # and waits for nobody
    assert not (run_dir / "elsewhere").exists()


def test_a_fifo_that_somebody_reads_is_no_log_either(run_dir: Path) -> None:
    path = run_dir / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PermissionDenied, match="not a regular file"):
        open_log(path)
    os.close(reader)


def test_only_a_regular_file_is_a_lock(run_dir: Path) -> None:
    os.mkfifo(RunDirectory(run_dir).worker_lock("host"))
    outcome = run_refused_worker(run_dir, "--device", "host")
    assert outcome.returncode == 1
    assert "not a regular file" in outcome.stderr


def test_a_long_log_is_put_aside_when_a_worker_is_started(run_dir: Path) -> None:
    path, aside = run_dir / "worker.log", run_dir / "worker.log.1"
    path.write_bytes(b"x" * MAX_LOG_BYTES)
    os.close(open_log(path))
    assert not aside.exists()
    path.write_bytes(b"x" * (MAX_LOG_BYTES + 1))
    fd = open_log(path)
    os.write(fd, b"new")
    os.close(fd)
    assert path.read_bytes() == b"new"
    assert aside.stat().st_size == MAX_LOG_BYTES + 1


LONG_LIFE = """
import sys
from pathlib import Path
from kvpage_server.standard_error import write_line
from kvpage_server.worker_log import MAX_LOG_BYTES, shorten_own_log
for line in ("x", "x" * MAX_LOG_BYTES, "after"):
    shorten_own_log(Path(sys.argv[1]))
    write_line(line)
print("out", flush=True)
"""


@pytest.mark.parametrize("is_own", [True, False], ids=["its own", "somebody's"])
def test_a_worker_shortens_its_log_while_it_runs_if_that_is_its_own(run_dir: Path, is_own: bool) -> None:
    path = run_dir / "worker.log"
    path.write_bytes(b"")
    with (path if is_own else run_dir / "journal").open("ab") as log:
        command = [sys.executable, "-c", LONG_LIFE, str(path)]
        subprocess.run(command, stdout=log, stderr=log, check=True, timeout=60)
    if is_own:
        assert path.read_text() == "after\nout\n"
        assert (run_dir / "worker.log.1").stat().st_size == MAX_LOG_BYTES + 3
    else:
        assert (run_dir / "journal").read_text().endswith("x\nafter\nout\n")
        assert path.read_bytes() == b""


def test_a_worker_looks_after_its_log(run_dir: Path) -> None:
    path = RunDirectory(run_dir).worker_log("host")
    path.write_bytes(b"x" * (MAX_LOG_BYTES + 1))
    with path.open("ab") as log:
        ready_out, ready_in = os.pipe()
        command = [*WORKER_COMMAND, "--device", "host", "--run-dir", str(run_dir), "--ready-fd", str(ready_in)]
        child = subprocess.Popen(command, pass_fds=[ready_in], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        os.close(ready_in)
    with child, open(ready_out, "rb") as ready:
        assert ready.read() == b"ready\n"
        child.terminate()
    assert '"event": "ended"' in path.read_text()
    assert path.with_name(path.name + ".1").stat().st_size > MAX_LOG_BYTES


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [92, 200], ids=["room for the server's socket alone", "room for none"])
def test_a_folder_whose_sockets_would_have_too_long_names_is_not_made(run_dir: Path, length: int) -> None:
    folder = run_dir / ("d" * (length - len(str(run_dir)) - 1))
    for outcome in (run_refused(folder), run_refused_worker(folder, "--device", "host")):
        assert outcome.returncode == 2
        assert "the limit is 107" in outcome.stderr
    assert not folder.exists()
