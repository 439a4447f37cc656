"""The run directory and whoever serves in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from kvpage.doctor.findings import Finding
from kvpage.errors import KvpageError, PermissionDenied
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient


def check_run_directory(run_dir: str | None = None) -> Iterator[Finding]:
    path = RunDirectory.default(run_dir).path
    try:
        status = path.stat()
    except FileNotFoundError:
        yield Finding("run directory", "absent", f"{path} does not exist yet; kvpage serve makes it")
        return
    except PermissionError as error:
        raise PermissionDenied(f"{path} cannot be reached: {error.strerror}; ask its owner for --group") from error
    text = f"{path}, mode {stat.S_IMODE(status.st_mode):04o}, owner uid {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        yield Finding("run directory", "problem", f"{text}: everybody may write to it", "chmod o-w, or choose another")
    elif not os.access(path, os.X_OK):
        yield Finding("run directory", "problem", f"{text}: closed to uid {os.geteuid()}", "serve with --group")
    else:
        yield Finding("run directory", "ok", text)


def check_workers(run_dir: str | None = None) -> Iterator[Finding]:
    """Ask every worker that has a socket here."""
    sockets = RunDirectory.default(run_dir).worker_sockets()
    if not sockets:
        yield Finding("workers", "absent", "none serves here", "start one with kvpage serve")
    for device, path in sockets:
        try:
            with WorkerClient(path, client_name="kvpage doctor") as worker:
                state = worker.ask(messages.DescribeDevice(), messages.DeviceState)
        except KvpageError as error:
            yield Finding(f"worker {device}", "problem", error.message)
            continue
        memory = f"{state.reserved_bytes:,} of {state.memory_limit_bytes:,} bytes reserved"
        text = f"pid {state.worker_pid}, {state.state}, {state.num_pools} pools, {memory}"
        yield Finding(f"worker {device}", "ok", text)
