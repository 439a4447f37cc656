"""`python -m kvpage_server worker`: the process that holds the memory of one device. Imports neither torch nor a web
framework, and takes everything from its command line, which `start_worker` writes from all sources of settings.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from kvpage.errors import KvpageError
from kvpage.memory.host import HostMemory
from kvpage.run_directory import RunDirectory, device_file_name
from kvpage_server.standard_error import write_line
from kvpage_server.start_errors import exit_status
from kvpage_server.start_errors import report as failure
from kvpage_server.unix_group import gid_of
from kvpage_server.worker_budget import HALF, Budget, parse_memory
from kvpage_server.worker_device import DeviceMemory, cuda_memory, host_memory
from kvpage_server.worker_disposal import Disposal
from kvpage_server.worker_endpoint import Endpoint
from kvpage_server.worker_limits import Limits, raise_fd_limit
from kvpage_server.worker_log import StartReport, log, shorten_own_log
from kvpage_server.worker_loop import Loop
from kvpage_server.worker_memory import MemoryKeeper
from kvpage_server.worker_pools import PoolTable
from kvpage_server.worker_server import Server
from kvpage_server.worker_takeover import Estate, Takeover

ADOPTION_S = 10.0
LOG_CHECK_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    run_directory: RunDirectory
    device: str = "host"
    memory: int | Fraction | None = None
    """Budget in bytes, or the share of what is available at start; None: that of the worker it replaces, or half."""
    group: int | None = None
    """Id of the group whose members may connect."""
    adopt_within_s: float = ADOPTION_S
    """How long clients wait for pools that outlived the worker before this one to be handed over."""
    replace: bool = False
    """Take over from a worker that runs."""
    report: StartReport = field(default_factory=lambda: StartReport(None))
    """Is told when clients can connect."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns the exit status: 0, or 1 or 2 when it could not start."""
    arguments = _parser().parse_args(argv)
    report = StartReport(arguments.ready_fd)
    try:
        options = _options(arguments, report)
        run(options, host_memory() if options.device == "host" else cuda_memory(options.device))
    except (KvpageError, OSError) as error:
        write_line(failure("worker", error))
        report.tell(str(error))
        return exit_status(error)
    return 0


def run(options: WorkerOptions, memory: DeviceMemory, limits: Limits | None = None) -> None:
    """Serve `options.device`, whose memory is `memory`, until a signal asks to end."""
    limits = limits or Limits(max_fds=raise_fd_limit())
    with contextlib.ExitStack() as stack:
        control_memory = HostMemory()
        if options.replace:  # before anybody has to wait for it
            importlib.import_module("kvpage_server.worker_blocks")
        takeover = stack.enter_context(_takeover(options, memory, control_memory)) if options.replace else None
        estate = None if takeover is None else takeover.fetch()
        endpoint = _endpoint(options, estate)
        stack.callback(endpoint.close)
        loop = Loop()
        stack.callback(loop.close)
        keeper = MemoryKeeper(loop, memory, control_memory)
        stack.callback(keeper.stop)
        disposal = Disposal()
        stack.callback(disposal.stop)
        pools = _pool_table(options, memory, endpoint, estate)
        group = options.group if estate is None else _group_of(endpoint)
        adoption_s = options.adopt_within_s if estate is None else 0.0
        server = Server(endpoint, pools, keeper, loop, disposal, limits=limits, group=group, adoption_s=adoption_s)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: loop.post(server.drain))
        signal.signal(signal.SIGCHLD, lambda *_: loop.post(memory.reap))
        loop.wake_for_signals()
        stack.callback(signal.set_wakeup_fd, -1)
        if estate is not None and takeover is not None:
            _move_in(endpoint, pools, server, takeover, estate)
        _announce(options, endpoint, pools)
        _keep_log_short(loop, options.run_directory.worker_log(options.device))
        loop.run()
    log("ended")


def _takeover(options: WorkerOptions, memory: DeviceMemory, control_memory: HostMemory) -> contextlib.closing[Takeover]:
    path = options.run_directory.worker_socket(options.device)
    return contextlib.closing(Takeover(path, options.device, memory, control_memory))


def _endpoint(options: WorkerOptions, estate: Estate | None) -> Endpoint:
    if estate is None:
        return Endpoint.open(options.run_directory, options.device, options.group)
    return Endpoint.inherit(options.run_directory, options.device, estate.listening_fd)


def _pool_table(options: WorkerOptions, memory: DeviceMemory, endpoint: Endpoint, estate: Estate | None) -> PoolTable:
    if estate is None:
        epoch = endpoint.predecessor_epoch if options.adopt_within_s > 0 else None
        budget = Budget(options.memory or HALF, memory.available_bytes, memory.free()[0])
        return PoolTable(options.device, budget, epoch, taken_bytes=memory.taken_bytes)
    limit = options.memory or estate.memory_limit_bytes
    budget = Budget(limit, memory.available_bytes, memory.free()[0])
    pools = PoolTable(options.device, budget, estate.epoch, taken_bytes=memory.taken_bytes)
    pools.next_hold_id = estate.next_hold_id
    for record, pool_memory in estate.pools:
        pools.adopt(record, pool_memory)
    return pools


def _group_of(endpoint: Endpoint) -> int | None:
    """Whose members may connect, as the one who made the socket has set it."""
    status = endpoint.path.stat()
    return status.st_gid if status.st_mode & stat.S_IWGRP else None


def _move_in(endpoint: Endpoint, pools: PoolTable, server: Server, takeover: Takeover, estate: Estate) -> None:
    for sock, packed in estate.connections:
        server.take(sock, packed)
    endpoint.listen_again()
    endpoint.take_lock(takeover.finish())
    server.serve_leases()
    is_kept = any(packed.role == "api" for _, packed in estate.connections)
    endpoint.own(pools.epoch if is_kept and len(pools) else None)


def _keep_log_short(loop: Loop, path: Path) -> None:
    shorten_own_log(path)
    loop.call_after(LOG_CHECK_S, lambda: _keep_log_short(loop, path))


def _announce(options: WorkerOptions, endpoint: Endpoint, pools: PoolTable) -> None:
    limit_bytes = pools.budget.limit_bytes
    log("listening", device=options.device, socket=endpoint.path, epoch=pools.epoch, memory_limit_bytes=limit_bytes)
    options.report.tell("ready")


def _options(arguments: argparse.Namespace, report: StartReport) -> WorkerOptions:
    device_file_name(arguments.device)
    return WorkerOptions(
        run_directory=RunDirectory.default(arguments.run_dir),
        device=arguments.device,
        memory=None if arguments.memory is None else parse_memory(arguments.memory),
        group=None if arguments.group is None else gid_of(arguments.group),
        adopt_within_s=arguments.adopt_within,
        replace=arguments.replace,
        report=report,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpage worker", allow_abbrev=False)
    parser.add_argument("--device", required=True)
    for flag in ("--run-dir", "--memory", "--group"):
        parser.add_argument(flag)
    parser.add_argument("--adopt-within", type=float, default=ADOPTION_S)
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--ready-fd", type=int)
    return parser
