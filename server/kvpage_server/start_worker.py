"""`kvpage worker` as a person or an init system starts it: reads flags, variables and file, and becomes the worker.

The worker itself takes everything from its command line, and loads none of what reading settings takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvpage.errors import KvpageError, SpecInvalid
from kvpage_server.configured import naming_places, run_directory_of
from kvpage_server.setting_flags import FlagParser, parser_of
from kvpage_server.setting_sources import Resolved, resolve
from kvpage_server.standard_error import write_line
from kvpage_server.start_errors import exit_status, report
from kvpage_server.unix_group import gid_of
from kvpage_server.worker_log import StartReport

WORKER = (sys.executable, "-m", "kvpage_server", "worker")


def main(arguments: Sequence[str]) -> int:
    """Does not return where it could start the worker."""
    flags = worker_parser().parse(arguments)
    ready_fd = flags.pop("ready_fd", None)
    replace = flags.pop("replace", False)
    try:
        command = worker_command(resolve(flags, os.environ), replace=replace, ready_fd=ready_fd)
    except (KvpageError, OSError) as error:
        write_line(report("worker", error))
        StartReport(ready_fd).tell(str(error))
        return exit_status(error)
    return _become(command)


def _become(command: list[str]) -> int:
    """Does not return."""
    os.execv(command[0], command)


def worker_command(resolved: Resolved, *, replace: bool = False, ready_fd: int | None = None) -> list[str]:
    """The worker with its settings checked and written out. Raises `SpecInvalid`, `TooLarge`."""
    fields, device = resolved.fields, device_of(resolved)
    run_directory = run_directory_of(resolved)
    run_directory.worker_socket(device)  # refuses odd names and long paths
    command = [*WORKER, "--device", device, "--run-dir", str(run_directory.path)]
    command += ["--adopt-within", str(fields.adopt_within_s)]
    if fields.memory is not None:
        command += ["--memory", fields.memory]
    if fields.group is not None:
        with naming_places(resolved):
            gid_of(fields.group)
        command += ["--group", fields.group]
    if replace:
        command += ["--replace"]
    if ready_fd is not None:
        command += ["--ready-fd", str(ready_fd)]
    return command


def device_of(resolved: Resolved) -> str:
    if resolved.fields.device is None:
        raise SpecInvalid("no device is named; give --device NAME, such as --device host, or KVPAGE_DEVICE")
    return resolved.fields.device


def worker_parser() -> FlagParser:
    parser = parser_of(
        "worker",
        "Hold the memory of one device and hand it to its clients.",
        epilog="kvpage worker drain ends a worker when nobody holds its pools; kvpage worker replace starts a new one"
        " that takes over from it. Each has --help.",
    )
    parser.add_argument("--replace", action="store_true", help="take over from the worker that runs")
    parser.add_argument(
        "--ready-fd", type=int, metavar="FD",
        help="write a line to this descriptor: ready when clients can connect, or why not",
    )  # fmt: skip
    return parser
