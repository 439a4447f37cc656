"""What `kvpage serve` was asked for: command line first, then `KVPAGE_*` variables, then defaults.

The run directory's variable is read by `kvpage.run_directory`, nowhere else.
"""

from __future__ import annotations

import argparse
import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpage.errors import SpecInvalid, shorten
from kvpage.run_directory import RunDirectory
from kvpage_server.access import is_loopback
from kvpage_server.intake import IntakeLimits
from kvpage_server.unix_group import gid_of

DEFAULT_HOST = "127.0.0.1"
DEFAULT_INTAKE = IntakeLimits()
DEFAULT_PLAN_CACHE_BYTES = 8 * 1024 * 1024  # plans of some 15,000 layers; the whole process stays under 80 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Complete and checked; made by `from_command_line`, or directly in tests."""

    run_directory: RunDirectory
    devices: tuple[str, ...] = ("host",)
    """Devices served, in order."""
    external_workers: bool = False
    """Whether something else starts the workers (an init system); then this server never starts or ends one."""
    leave_workers: bool = False
    """Whether workers go on when the server ends."""
    memory: str | None = None
    """Passed on to workers: bytes, or a fraction of what is available."""
    group: str | None = None
    """Unix group, by name or number, that may use the server and its workers."""
    host: str = DEFAULT_HOST
    port: int | None = None
    """TCP port, 0 for any free one; None: the Unix socket only."""
    token_file: Path | None = None
    ready_fd: int | None = None
    """Descriptor to write one line to, and close, when every worker answers."""
    intake: IntakeLimits = DEFAULT_INTAKE
    plan_cache_bytes: int = DEFAULT_PLAN_CACHE_BYTES

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise SpecInvalid(f"devices {list(self.devices)} must be at least one, each once")
        for device in self.devices:
            self.run_directory.worker_socket(device)  # refuses odd names and long paths before anything is made
        if self.port is not None and not 0 <= self.port <= 65535:
            raise SpecInvalid(f"port {self.port} is not between 0 and 65535")
        if self.port is not None and self.token_file is None and not is_loopback(self.host):
            raise SpecInvalid(
                f"host {shorten(self.host)} can be reached from other machines; give --token-file or use {DEFAULT_HOST}"
            )

    @property
    def group_gid(self) -> int | None:
        return None if self.group is None else gid_of(self.group)


def from_command_line(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Exits with a usage message, as argparse does, for arguments it does not know."""
    options = _parser(environ).parse_args(arguments)
    if options.ready_fd is not None:
        _check_writable(options.ready_fd)
    devices = tuple(options.device or environ.get("KVPAGE_DEVICES", "host").split(","))
    return Settings(
        run_directory=RunDirectory.default(options.run_dir),
        devices=devices,
        external_workers=options.external_workers,
        leave_workers=options.leave_workers,
        memory=options.memory,
        group=options.group,
        host=options.host,
        port=options.port,
        token_file=options.token_file,
        ready_fd=options.ready_fd,
    )


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvpage serve", description="Serve plans and pools on the run directory's Unix socket.", allow_abbrev=False
    )
    port = environ.get("KVPAGE_PORT")
    token_file = environ.get("KVPAGE_TOKEN_FILE")
    parser.add_argument("--run-dir", metavar="DIR", help="folder of sockets and logs (KVPAGE_RUN_DIR)")
    parser.add_argument(
        "--device", action="append", metavar="NAME", help="host, cuda:N or a GPU UUID; repeat it (KVPAGE_DEVICES)"
    )
    parser.add_argument(
        "--memory",
        default=environ.get("KVPAGE_MEMORY"),
        help="each worker's budget: bytes such as 8GiB, or a share of what is available; default 0.5 (KVPAGE_MEMORY)",
    )
    parser.add_argument(
        "--group", default=environ.get("KVPAGE_GROUP"), help="Unix group that may connect (KVPAGE_GROUP)"
    )
    parser.add_argument(
        "--host", default=environ.get("KVPAGE_HOST", DEFAULT_HOST), help="TCP address, default 127.0.0.1 (KVPAGE_HOST)"
    )
    parser.add_argument(
        "--port", type=int, default=port, help="TCP port, 0 for any; without it only the Unix socket (KVPAGE_PORT)"
    )
    parser.add_argument(
        "--token-file", type=Path, default=token_file, metavar="FILE",
        help="a bearer token that may do everything over TCP (KVPAGE_TOKEN_FILE)",
    )  # fmt: skip
    parser.add_argument("--external-workers", action="store_true", help="something else starts and ends the workers")
    parser.add_argument(
        "--ready-fd", type=int, metavar="FD", help="write a line to this descriptor when every worker answers"
    )
    parser.add_argument("--leave-workers", action="store_true", help="let workers go on when the server ends")
    return parser


def _check_writable(fd: int) -> None:
    """Raises `SpecInvalid` for what cannot be written to: else whoever waits for the line would wait for ever."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except (OSError, ValueError, OverflowError):  # not open, negative, no descriptor at all
        raise SpecInvalid(f"--ready-fd {fd} is not open in this process; pass a descriptor on to it") from None
    if flags & os.O_ACCMODE == os.O_RDONLY:
        raise SpecInvalid(f"--ready-fd {fd} is open for reading only; pass the end of the pipe that is written to")
