"""Where the worker is that has a pool: the run directory, the sockets in it, and what to say when there are none."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from kvpage.client.arguments import checked_path
from kvpage.errors import Conflict, DeviceUnavailable, PermissionDenied, PoolNotFound, WorkerLost, shorten
from kvpage.memory.device_names import is_cuda_name, names_device
from kvpage.run_directory import SYSTEM_RUN_DIRECTORY, RunDirectory
from kvpage.wire import messages
from kvpage.wire.client import WorkerClient
from kvpage.wire.connecting import system_error
from kvpage.wire.values import as_name

DEFAULT_TIMEOUT_S = 10.0
SHORTEST_ANSWER_S = 1.0
"""A worker that is there is given this long to answer, even by those who would not wait for one."""


def find_run_directory(explicit: str | os.PathLike[str] | None) -> RunDirectory:
    """As `RunDirectory.default`. Raises `SpecInvalid` for what is no path, `TooLarge` where no socket can be."""
    runs = RunDirectory.default(checked_path("run_dir", explicit))
    runs.worker_socket("host")
    return runs


def served_socket(device: str, runs: RunDirectory, timeout_s: float) -> Path:
    """The socket of the worker of `device`, which may have been started by the other name of it; then the workers are
    asked, each for up to `timeout_s`. Raises `DeviceUnavailable`, `PermissionDenied` when it cannot be seen.
    """
    path = runs.worker_socket(device)
    _check_open(runs)
    if not path.exists():
        path = _socket_by_other_name(device, runs, timeout_s) or path
    if not path.exists():
        raise _no_worker(f"no worker for device {shorten(device)}", runs)
    return path


def _socket_by_other_name(device: str, runs: RunDirectory, timeout_s: float) -> Path | None:
    if not is_cuda_name(device):
        return None
    for served, path in runs.worker_sockets():
        if is_cuda_name(served):
            with contextlib.suppress(WorkerLost), WorkerClient(path, timeout_s=timeout_s) as worker:
                known = worker.ask(messages.DescribeDevice(), messages.DeviceState)
                if names_device(device, uuid=known.device_uuid, number=known.device_number):
                    return path
    return None


def device_with(name: str, runs: RunDirectory, timeout_s: float) -> str:
    """The one device whose worker has pool `name`; it is not asked when there is only one."""
    return _worker_with(name, runs, timeout_s)[0]


def socket_with(name: str, runs: RunDirectory, timeout_s: float) -> Path:
    """The socket of the worker of `device_with`."""
    return _worker_with(name, runs, timeout_s)[1]


def _worker_with(name: str, runs: RunDirectory, timeout_s: float) -> tuple[str, Path]:
    workers = _served_devices(runs)
    if len(workers) == 1:
        return workers[0]
    found: dict[str, Path] = {}
    lost: dict[str, WorkerLost] = {}
    for device, path in workers:
        try:
            with WorkerClient(path, timeout_s=timeout_s) as worker:
                worker.ask(messages.FindPool(name=name), messages.PoolState)
                found[device] = path
        except PoolNotFound:
            continue
        except WorkerLost as error:
            lost[device] = error
    if len(found) > 1:
        raise Conflict(f"pool {shorten(name)!r} exists on {', '.join(found)}; name the device")
    if found:
        return next(iter(found.items()))
    if lost:  # one of them may have it, or its successor will
        device, reason = next(iter(lost.items()))
        raise WorkerLost(f"pool {shorten(name)!r} is on no device whose worker answers; that of {device}: {reason}")
    devices = ", ".join(device for device, _ in workers)
    raise PoolNotFound(f"no pool {shorten(name)!r} on {devices}; create it first (`kvpage pools create`)")


def _served_devices(runs: RunDirectory) -> list[tuple[str, Path]]:
    """Each with the socket of its worker."""
    _check_open(runs)
    try:
        devices = runs.worker_sockets()
    except OSError as error:
        raise system_error(f"looking for workers in {runs.path}", error) from error
    if not devices:
        raise _no_worker("no device worker", runs)
    return devices


def _check_open(runs: RunDirectory) -> None:
    """A folder that is closed to this user looks empty to `glob`."""
    try:
        runs.path.stat()
        is_open = os.access(runs.path, os.R_OK | os.X_OK)
    except PermissionError:
        is_open = False
    except FileNotFoundError:
        return
    except OSError as error:
        raise system_error(f"looking at the run directory {shorten(str(runs.path))}", error) from error
    if not is_open:
        raise PermissionDenied(_closed(runs.path))


def _no_worker(who: str, runs: RunDirectory) -> DeviceUnavailable:
    hint = "" if runs.path == SYSTEM_RUN_DIRECTORY else closed_system_directory()
    return DeviceUnavailable(f"{who} has a socket in {runs.path}; start one with `kvpage serve`{hint}")


def closed_system_directory(path: Path = SYSTEM_RUN_DIRECTORY) -> str:
    """The end of a sentence about nobody being found: there is a place where this user may not look."""
    return f"; {_closed(path)}" if os.path.exists(path) and not os.access(path, os.R_OK | os.X_OK) else ""


def _closed(folder: Path) -> str:
    return (
        f"the run directory {shorten(str(folder))} is closed to uid {os.geteuid()}; run as its owner, or as a member of"
        " its group if it was made with --group"
    )


def program_name() -> str:
    """What a client is called that has no name."""
    return as_name(os.path.basename(sys.argv[0])) if sys.argv and sys.argv[0] else "python"
