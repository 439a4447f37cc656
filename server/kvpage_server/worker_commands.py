"""`kvpage worker drain` and `kvpage worker replace`: what a person does to a worker that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpage.errors import InternalError, KvpageError, WorkerLost
from kvpage.exit_status import DONE, error_json, status_of
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages, succession
from kvpage.wire.client import WorkerClient
from kvpage_server.configured import run_directory_of
from kvpage_server.device_process import SERVER_MARK, last_line_of
from kvpage_server.setting_flags import FlagParser, parser_of
from kvpage_server.setting_sources import Resolved, resolve
from kvpage_server.standard_error import write_line
from kvpage_server.start_errors import report
from kvpage_server.start_worker import device_of, worker_command
from kvpage_server.worker_log import open_log

DEFAULT_DEVICE = "host"


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, or another when the worker is as it was before."""
    command, *typed = arguments
    flags = (_drain_parser() if command == "drain" else _replace_parser()).parse(typed)
    wait_s, lose_pools = flags.pop("wait", 0.0), flags.pop("lose_pools", False)
    as_json = flags.pop("json", False)
    try:
        resolved = resolve(flags, os.environ).with_device(DEFAULT_DEVICE)
        told = _drain(resolved, wait_s=wait_s, lose_pools=lose_pools) if command == "drain" else _replace(resolved)
    except (KvpageError, OSError) as error:
        told_as = error if isinstance(error, KvpageError) else InternalError(str(error))
        write_line(error_json(told_as) if as_json else report(f"worker {command}", error))
        return status_of(told_as)
    if as_json:
        sys.stdout.write(json.dumps(told.facts) + "\n")
    else:
        sys.stderr.write(told.text + "\n")
    return DONE


class Told(NamedTuple):
    """What was done."""

    text: str
    facts: dict[str, Any]


def _drain(resolved: Resolved, *, wait_s: float, lose_pools: bool) -> Told:
    runs, device = _place_of(resolved)
    with _client(runs, device) as client:
        body = succession.DrainWorker(timeout_s=wait_s, lose_pools=lose_pools)
        drained = client.ask(body, succession.WorkerDrained)
    text = f"drained {device}: its worker ends; it had {drained.num_pools} pools"
    return Told(text, {"device": device, "num_pools": drained.num_pools})


def _replace(resolved: Resolved) -> Told:
    runs, device = _place_of(resolved)
    with _client(runs, device) as client:
        old = client.ask(messages.DescribeDevice(), messages.DeviceState)
    _start_successor(resolved, _environment_of(old.worker_pid))
    with _client(runs, device) as client:
        new = client.ask(messages.DescribeDevice(), messages.DeviceState)
    num_clients = new.num_clients - 1  # without this one
    text = (
        f"replaced {device}: worker {new.worker_pid} instead of {old.worker_pid}, {new.num_pools} pools,"
        f" {num_clients} clients"
    )
    facts = {
        "device": device,
        "worker_pid": new.worker_pid,
        "old_worker_pid": old.worker_pid,
        "num_pools": new.num_pools,
        "num_clients": num_clients,
    }
    return Told(text, facts)


def _place_of(resolved: Resolved) -> tuple[RunDirectory, str]:
    return run_directory_of(resolved), device_of(resolved)


def _start_successor(resolved: Resolved, environment: dict[str, str]) -> None:
    """Start it apart from this terminal, and wait until it serves. Raises `WorkerLost` when it ends instead."""
    runs, device = _place_of(resolved)
    ready_fd, worker_fd = os.pipe()
    log_fd = open_log(runs.worker_log(device))
    try:
        child = subprocess.Popen(
            worker_command(resolved, replace=True, ready_fd=worker_fd),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            pass_fds=(worker_fd,),
            start_new_session=True,
            env=environment,
        )
    finally:
        os.close(worker_fd)
        os.close(log_fd)
    with open(ready_fd, "rb") as ready:
        told = ready.readline().decode("utf-8", "replace").strip()
    if told != "ready":
        status, last = child.wait(), told or last_line_of(runs.worker_log(device))
        raise WorkerLost(f"the new worker ended with status {status}; its last words: {last}")


def _environment_of(pid: int) -> dict[str, str]:
    """Ours, with the mark of the worker at `pid`: a server ends the workers that servers started, whoever replaced
    them.
    """
    environment = dict(os.environ)
    marked = f"{SERVER_MARK}=1"
    if marked.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        environment[SERVER_MARK] = "1"
    return environment


def _client(runs: RunDirectory, device: str) -> WorkerClient:
    return WorkerClient(runs.worker_socket(device), role="api", client_name="kvpage worker")


def _drain_parser() -> FlagParser:
    parser = parser_of(
        "worker", "End a worker when nobody holds its pools any more.", command="drain", only=("run_dir", "device")
    )
    parser.add_argument("--wait", type=float, metavar="SECONDS", help="how long holders may take; default 0")
    parser.add_argument("--lose-pools", action="store_true", help="end it even if nobody else keeps its pools")
    return _with_json(parser)


def _replace_parser() -> FlagParser:
    parser = parser_of(
        "worker", "Start a new worker that takes over pools, clients and socket.", command="replace",
        epilog="Without --memory from anywhere the new one has the budget of the one before.",
    )  # fmt: skip
    return _with_json(parser)


def _with_json(parser: FlagParser) -> FlagParser:
    parser.add_argument("--json", action="store_true", help="print what was done as JSON, and errors too")
    return parser
