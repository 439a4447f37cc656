"""The kvpage service of this machine, as its allocator uses it: asked over its socket, started as a program of its own.

No allocator holds memory. Its service and the workers of that are neither its children nor in its session, so they
outlive it, and the raylet, and whatever else ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvpage.client.http import Client
from kvpage.client.resources import Device, Pool
from kvpage.errors import MAX_ECHO_CHARS, DeviceUnavailable, KvpageError, shorten
from kvpage.fleet.records import FleetRecord, ServiceOptions
from kvpage.run_directory import RunDirectory

POLL_S = 1.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
WAIT_FOR_MEMORY_S = 600.0
# Forks away from whoever runs it: that one's end, and the end of its process group, are not the service's.
_LAUNCH = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


class LocalService:
    """What `kvpage.fleet.allocator.Service` asks for, by HTTP over the Unix socket in the run directory."""

    def __init__(self, runs: RunDirectory, options: ServiceOptions) -> None:
        self._runs = runs
        self._options = options

    def devices(self) -> list[Device]:
        try:
            with self._client() as client:
                return client.devices()
        except DeviceUnavailable as error:
            raise DeviceUnavailable(f"{error.message}{self._last_words()}") from error

    def pools(self) -> list[Pool]:
        with self._client() as client:
            return client.pools()

    def create_pool(self, record: FleetRecord, rank: int) -> Pool:
        with self._client() as client:
            return client.create_pool(
                record.request,
                name=record.pool_name(rank),
                device=record.places[rank].device,
                rank=rank,
                plan_id=record.plan_ids[rank],
                wait_s=WAIT_FOR_MEMORY_S,
            )

    def delete_pool(self, pool_id: str, *, force: bool) -> None:
        with self._client() as client:
            client.delete_pool(pool_id, force=force)

    def answers(self) -> bool:
        """Whether somebody serves, ready or not."""
        try:
            with self._client() as client:
                client.health()
        except KvpageError:
            return False
        return True

    def start(self) -> None:
        """As a program that belongs to nobody; a second one finds the first and ends. Without effect if external."""
        if self._options.is_external:
            return
        self._runs.create()
        command = [sys.executable, "-m", "kvpage_server", "serve", "--run-dir", str(self._runs.path)]
        for device in self._options.devices:
            command += ["--device", device]
        if self._options.memory is not None:
            command += ["--memory", self._options.memory]
        with open(self._log_path, "ab") as log:
            subprocess.run(
                [sys.executable, "-c", _LAUNCH, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
                check=True,
            )

    def wait_ready(self) -> None:
        """Raises `DeviceUnavailable` when no service answers in time, or its workers do not."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        detail = "nobody answers"
        while time.monotonic() < deadline_s:
            with contextlib.suppress(KvpageError), self._client() as client:
                health = client.health()
                if health.status == "ready":
                    return
                detail = "; ".join(f"{check.name}: {check.detail}" for check in health.checks if not check.ok)
            time.sleep(0.1)
        raise DeviceUnavailable(
            f"the service in {self._runs.path} is not ready after {START_TIMEOUT_S:g} s ({detail}); "
            f"see {self._log_path}"
        )

    @property
    def _log_path(self) -> Path:
        return self._runs.path / "serve.log"

    def _last_words(self) -> str:
        """Of a service that was started here and does not answer: why it ended, if it could say."""
        try:
            lines = self._log_path.read_text(errors="replace")[-MAX_ECHO_CHARS:].splitlines()
        except OSError:
            return ""
        return f"; the last line of {self._log_path}: {shorten(lines[-1])}" if lines else ""

    def stop(self) -> None:
        """End what `start` started, and its workers with it. Raises `DeviceUnavailable` when it does not end."""
        if self._options.is_external:
            return
        pid = serving_pid(self._runs.api_socket)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while serving_pid(self._runs.api_socket) == pid:
            if time.monotonic() > deadline_s:
                raise DeviceUnavailable(f"the service in {self._runs.path} (pid {pid}) does not end")
            time.sleep(0.1)

    def _client(self) -> Client:
        return Client(run_dir=str(self._runs.path))


class Supervision:
    """A thread that starts the service again when nobody answers. `close` ends the thread, not the service."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kvpage-service", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.is_set():
            if not self._service.answers():
                with contextlib.suppress(KvpageError, OSError, subprocess.SubprocessError):
                    self._service.start()
                    self._service.wait_ready()
            self._closed.wait(POLL_S)


def serving_pid(path: Path) -> int | None:
    """Of the process that listens on a Unix socket, as the kernel says; None when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(os.fspath(path))
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)


def _environment() -> dict[str, str]:
    """Ours without what Ray told its own worker."""
    return dict(_not_of_ray())


def _not_of_ray() -> Iterator[tuple[str, str]]:
    for name, value in os.environ.items():
        if not name.startswith("RAY_"):
            yield name, value
