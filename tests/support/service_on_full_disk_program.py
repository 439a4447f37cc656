"""Run as a program, with a file system of its own that is small: what the service does when that is full.

`FOLDER [SCENE …]`, as root of a user and mount namespace; the small file systems are mounted in
FOLDER. Writes what came of it as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvpage.errors import KvpageError
from support.api_service import ApiService, kill_process, run_refused
from support.attacked_service import Bystander, faults_in, losing
from support.command_line import run
from support.eventually import until
from support.plan_requests import small_request
from support.tally import Tally

NO_SPACE = "No space left on device"
SIZE_BYTES = 256 << 10


@contextlib.contextmanager
def small_disk(folder: Path, options: str = f"size={SIZE_BYTES}") -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave not a byte."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def use_up_names(folder: Path) -> None:
    """Leave room for no further file, nor socket."""
    with contextlib.suppress(OSError):
        for number in range(100_000):
            (folder / f"filler{number}").touch()


def start(folder: Path) -> None:
    with small_disk(folder):
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700)
        fill(folder)
        with _service(run_dir) as service:
            _use(service)


def start_without_names(folder: Path) -> None:
    """No socket can be made: the server says so, and ends."""
    with small_disk(folder, "nr_inodes=8"):
        run_dir = folder / "run"
        run_dir.mkdir(mode=0o700)
        use_up_names(folder)
        refused = run_refused(run_dir)
        assert refused.returncode != 0
        assert NO_SPACE in refused.stderr, refused.stderr
        assert not list(faults_in(refused.stderr)), refused.stderr


def while_running(folder: Path) -> None:
    with small_disk(folder), _service(folder / "run") as service:
        _use(service)
        fill(folder)
        _use(service)


def a_worker_dies(folder: Path) -> None:
    """Its successor has the pool, though neither log nor lock file can be written."""
    with small_disk(folder), _service(folder / "run") as service:
        with service.client() as client:
            pool = client.create_pool(small_request(), name="kept")
            fill(folder)
            before = service.worker_pid()
            kill_process(before)
            until(lambda: client.devices()[0].worker_pid not in (None, before))
            assert [(one.id, one.state) for one in client.pools()] == [(pool.id, "ready")]
        _use(service)


def a_worker_is_replaced(folder: Path) -> None:
    with small_disk(folder), _service(folder / "run") as service:
        with service.client() as client:
            pool = client.create_pool(small_request(), name="kept")
            fill(folder)
            before = service.worker_pid()
            done = run("worker", "replace", "--device", "host", "--run-dir", str(folder / "run"))
            assert done.returncode == 0, done.stderr
            assert service.worker_pid() != before
            assert [(one.id, one.state) for one in client.pools()] == [(pool.id, "ready")]
        _use(service)


def the_log_is_full(folder: Path) -> None:
    """Lines end in their middle, and nobody minds."""
    with small_disk(folder), _service(folder / "run") as service:
        fill(folder)
        log = folder / "run" / "worker-host.log"
        with (folder / "filler").open("r+b") as file:
            file.truncate(file.seek(0, os.SEEK_END) - 4096)
        with service.client() as client:
            for number in range(60):
                client.delete_pool(client.create_pool(small_request(), name=f"pool {number}").id)
        assert os.statvfs(folder).f_bavail == 0, f"the disk is not full: {log.stat().st_size} bytes of log"
        _use(service)


def a_picture_is_written(folder: Path) -> None:
    with small_disk(folder):
        fill(folder)
        done = run("plan", str(Path(__file__).parents[2] / "examples" / "mimo.json"), "--svg", str(folder / "a.svg"))
        assert done.returncode != 0
        assert NO_SPACE in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def pools_are_created_by_hand(folder: Path) -> None:
    with small_disk(folder), _service(folder / "run") as service:
        fill(folder)
        example = Path(__file__).parents[2] / "examples" / "mimo.json"
        done = run("pools", "create", str(example), "--name", "mimo", "--run-dir", str(folder / "run"))
        assert done.returncode == 0, done.stderr
        _use(service)


def files_are_limited(folder: Path) -> None:
    """By `ulimit -f`, which memory that a file descriptor names counts against as well."""
    limited = ["sh", "-c", 'ulimit -f 16384; exec "$@"', "sh", sys.executable, "-m", "kvpage_server", "serve"]
    folder.mkdir()
    with ApiService(folder / "run", "--port", "0", "--memory", "256MiB", command=limited) as service:
        with service.client() as client, pytest.raises(KvpageError, match="File too large"):
            client.create_pool(small_request(memory_bytes=64 << 20), name="too large")
        _use(service)


SCENES: dict[str, Callable[[Path], None]] = {
    "the server starts": start,
    "the server starts, and no file can be made": start_without_names,
    "while it serves": while_running,
    "a worker dies": a_worker_dies,
    "a worker is replaced": a_worker_is_replaced,
    "in the middle of a line of the log": the_log_is_full,
    "kvpage plan --svg": a_picture_is_written,
    "kvpage pools create": pools_are_created_by_hand,
    "ulimit -f": files_are_limited,
}


@contextlib.contextmanager
def _service(run_dir: Path) -> Iterator[ApiService]:
    """Its own log is elsewhere: what it says there is looked at."""
    log = run_dir.parent.parent / f"{run_dir.parent.name}.log"
    with ApiService(run_dir, "--port", "0", "--memory", "96MiB", log=log) as service:
        yield service
        assert not (faults := list(faults_in(service.log()))), faults


def _use(service: ApiService) -> None:
    Bystander(service).ask()
    with service.client() as client:
        client.delete_pool(client.create_pool(small_request(), name="used").id)


if __name__ == "__main__":
    _tally = Tally()
    for _number, (_name, _scene) in enumerate(SCENES.items()):
        if not sys.argv[2:] or _name in sys.argv[2:]:
            with losing(_tally, _name):
                _scene(Path(sys.argv[1]) / str(_number))
                _tally.survive(_name)
    sys.stdout.write(json.dumps({"outcomes": _tally.outcomes, "losses": _tally.losses}))
