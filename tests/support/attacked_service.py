"""A server under attack, and who judges it: somebody well-behaved must be answered rightly all the time, and afterwards
nothing may be left of the attack.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import kvpage
from support import tight_server
from support.api_service import ApiService
from support.eventually import TIMEOUT_S, until
from support.plan_requests import small_request
from support.raw_http import RawHttp
from support.tally import Tally

MAX_GROWTH_BYTES = 96 << 20
"""That the server may have more of memory after an attack than before: its caches, and what its allocator keeps."""

_FAULT = re.compile(r"Traceback|\bERROR\b|\bCRITICAL\b|\"level\": ?\"(error|critical)\"|never retrieved|internal_error")
_BODY = json.dumps(small_request()).encode()
_PLAN_ID = kvpage.plan(small_request()).plan_id


@contextlib.contextmanager
def attacked_service(limits: Mapping[str, float] = MappingProxyType({})) -> Iterator[ApiService]:
    """`limits`: fields of `IntakeLimits`, so that tests need not wait for the usual ones."""
    command = [sys.executable, tight_server.__file__, json.dumps(dict(limits))]
    with tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--port", "0", "--memory", "64MiB", command=command) as service:
            yield service


class Bystander:
    """Somebody who uses the service as everybody does, over a connection of each kind that is opened anew."""

    def __init__(self, service: ApiService) -> None:
        self._service = service
        self.num_answers = 0

    def ask(self) -> None:
        """Raises AssertionError unless the answers are right, EOFError where there is none."""
        for over in ("unix", "tcp"):
            with RawHttp(self._service, over) as client:
                client.send(b"GET /livez HTTP/1.1\r\nHost: <host>\r\n\r\n")
                assert client.answer().json() == {"status": "ok"}
                client.send(b"POST /v1/plans HTTP/1.1\r\nHost: <host>\r\nContent-Type: application/json\r\n")
                client.send(b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY)
                assert client.answer().json()["plan_id"] == _PLAN_ID
                self.num_answers += 1


class Remains:
    """What a process has before an attack, to be compared with what it has after it."""

    def __init__(self, service: ApiService) -> None:
        Bystander(service).ask()
        self._service = service
        self._pids = {"the server": service.pid, "the worker": service.worker_pid()}
        self._before = {name: _held(pid) for name, pid in self._pids.items()}
        self._worker_log = service.run_directory.path / "worker-host.log"
        self._logged = len(service.log()), len(self._worker_log.read_text())

    def losses(self, patience_s: float) -> Iterator[str]:
        """What is left of the attack, or was written into the log."""
        for name, pid in self._pids.items():
            yield from self._left(name, pid, patience_s)
        of_server, of_worker = self._logged
        yield from faults_in(self._service.log()[of_server:])
        yield from faults_in(self._worker_log.read_text()[of_worker:])

    def _left(self, name: str, pid: int, patience_s: float) -> Iterator[str]:
        fds, threads, before_bytes = self._before[name]
        with contextlib.suppress(AssertionError):
            until(lambda: _held(pid).num_fds <= fds, patience_s)
        after = _held(pid)
        if after.num_fds > fds:
            yield f"{name} has {after.num_fds - fds} descriptors more"
        if after.num_threads > threads + 8:  # threads of pools of threads stay, and have a bound
            yield f"{name} has {after.num_threads - threads} threads more"
        if after.memory_bytes > before_bytes + MAX_GROWTH_BYTES:
            yield f"{name} has {(after.memory_bytes - before_bytes) >> 20} MiB more"


class _Held(tuple[int, int, int]):
    @property
    def num_fds(self) -> int:
        return self[0]

    @property
    def num_threads(self) -> int:
        return self[1]

    @property
    def memory_bytes(self) -> int:
        return self[2]


def _held(pid: int) -> _Held:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    memory_kib = int(fields["VmRSS"].split()[0])
    return _Held((len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]), memory_kib << 10))


def faults_in(log: str) -> Iterator[str]:
    """Lines of a log that an attack must not bring about."""
    for line in log.splitlines():
        if _FAULT.search(line):
            yield f"in the log: {line[:200]}"


def conclude(tally: Tally, remains: Remains, bystander: Bystander, patience_s: float = TIMEOUT_S) -> None:
    """Adds what is left afterwards, and whether the service still answers."""
    with losing(tally, "afterwards"):
        bystander.ask()
    for loss in remains.losses(patience_s):
        tally.lose(loss)


@contextlib.contextmanager
def losing(tally: Tally, what: str) -> Iterator[None]:
    """What is raised inside is a loss."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the table must say so
        tally.lose(f"{what}: {type(error).__name__}: {str(error)[:300]}")
