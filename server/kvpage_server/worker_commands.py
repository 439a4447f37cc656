"""`kvpage worker drain` and `kvpage worker replace`: what a person does to a worker that runs."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpage.errors import KvpageError, WorkerLost
from kvpage.run_directory import RunDirectory
from kvpage.wire import messages, succession
from kvpage.wire.client import WorkerClient
from kvpage_server.device_process import SERVER_MARK, last_line_of
from kvpage_server.worker_log import open_log


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0, or 1 when the worker is as it was before."""
    options, passed_on = _parser().parse_known_args(arguments)
    runs = RunDirectory.default(options.run_dir)
    try:
        if options.command == "drain":
            _refuse(passed_on)
            _drain(runs, options.device, wait_s=options.wait, lose_pools=options.lose_pools)
        else:
            _replace(runs, options.device, passed_on)
    except (KvpageError, OSError) as error:
        sys.stderr.write(f"kvpage worker {options.command}: {error}\n")
        return 1
    return 0


def _drain(runs: RunDirectory, device: str, *, wait_s: float, lose_pools: bool) -> None:
    with _client(runs, device) as client:
        body = succession.DrainWorker(timeout_s=wait_s, lose_pools=lose_pools)
        drained = client.ask(body, succession.WorkerDrained)
    sys.stderr.write(f"drained {device}: its worker ends; it had {drained.num_pools} pools\n")


def _replace(runs: RunDirectory, device: str, passed_on: Sequence[str]) -> None:
    with _client(runs, device) as client:
        old = client.ask(messages.DescribeDevice(), messages.DeviceState)
    _start_successor(runs, device, _environment_of(old.worker_pid), passed_on)
    with _client(runs, device) as client:
        new = client.ask(messages.DescribeDevice(), messages.DeviceState)
    sys.stderr.write(
        f"replaced {device}: worker {new.worker_pid} instead of {old.worker_pid}, {new.num_pools} pools,"
        f" {new.num_clients - 1} clients\n"
    )


def _start_successor(runs: RunDirectory, device: str, environment: dict[str, str], passed_on: Sequence[str]) -> None:
    """Start it apart from this terminal, and wait until it serves. Raises `WorkerLost` when it ends instead."""
    command = [sys.executable, "-m", "kvpage_server", "worker", "--replace"]
    command += ["--device", device, "--run-dir", str(runs.path), *passed_on]
    ready_fd, worker_fd = os.pipe()
    log_fd = open_log(runs.worker_log(device))
    try:
        child = subprocess.Popen(
            [*command, "--ready-fd", str(worker_fd)],
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


def _refuse(unknown: Sequence[str]) -> None:
    if unknown:
        _parser().error(f"unrecognized arguments: {' '.join(unknown)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpage worker", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    drain = commands.add_parser("drain", help="end it when nobody holds its pools any more", allow_abbrev=False)
    drain.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="how long holders may take")
    drain.add_argument("--lose-pools", action="store_true", help="end it even if nobody else keeps its pools")
    replace = commands.add_parser(
        "replace",
        help="start a new one that takes over pools, clients and socket",
        epilog="Other options (--memory, --group) are those of `kvpage worker`, for the new one.",
        allow_abbrev=False,
    )
    for command in (drain, replace):
        command.add_argument("--device", default="host", metavar="NAME")
        command.add_argument("--run-dir", metavar="DIR", help="folder of the socket (KVPAGE_RUN_DIR)")
    return parser
