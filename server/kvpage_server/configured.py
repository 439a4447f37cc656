"""From command line, variables and file to what `kvpage serve` runs with."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from kvpage.errors import SpecInvalid
from kvpage.run_directory import RunDirectory
from kvpage_server.setting_fields import flag_of
from kvpage_server.setting_flags import FlagParser, parser_of
from kvpage_server.setting_sources import Resolved, resolve
from kvpage_server.settings import Settings


def from_command_line(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """What `kvpage serve` runs with. Ends the process with a usage message for arguments it does not know.

    Raises `SpecInvalid` for settings that are wrong, whatever they came from.
    """
    flags = serve_parser().parse(arguments)
    ready_fd = flags.pop("ready_fd", None)
    if ready_fd is not None:
        _check_writable(ready_fd)
    return settings_of(resolve(flags, environ), ready_fd)


def settings_of(resolved: Resolved, ready_fd: int | None = None) -> Settings:
    """Raises `SpecInvalid` for settings that are wrong together, or on this machine."""
    with naming_places(resolved):
        return _settings(resolved, ready_fd)


@contextlib.contextmanager
def naming_places(resolved: Resolved) -> Iterator[None]:
    """Lets what is refused say where the settings that it names come from, unless they were typed."""
    try:
        yield
    except SpecInvalid as error:
        raise SpecInvalid(error.message + _places_of(error.message, resolved)) from error


def _places_of(message: str, resolved: Resolved) -> str:
    """Where the settings are set that the message names, by themselves or by their flags."""
    places = [
        f"{name} in {origin}"
        for name, origin in resolved.origins.items()
        if origin.source in ("file", "variable") and re.search(rf"(?<![\w-])({name}|{flag_of(name)})(?![\w-])", message)
    ]
    return f" ({', '.join(places)})" if places else ""


def _settings(resolved: Resolved, ready_fd: int | None) -> Settings:
    fields = resolved.fields
    return Settings(
        run_directory=run_directory_of(resolved),
        devices=fields.devices,
        external_workers=fields.external_workers,
        leave_workers=fields.leave_workers,
        memory=fields.memory,
        adopt_within_s=fields.adopt_within_s,
        group=fields.group,
        host=fields.host,
        port=fields.port,
        token_file=fields.token_file,
        tls_cert_file=fields.tls_cert_file,
        tls_key_file=fields.tls_key_file,
        tls_client_ca_file=fields.tls_client_ca_file,
        insecure=fields.insecure,
        fleet=fields.fleet,
        audit_log=fields.audit_log,
        rate_limit_per_s=fields.rate_limit_per_s,
        log_format=fields.log_format,
        log_level=fields.log_level,
        ready_fd=ready_fd,
    )


def run_directory_of(resolved: Resolved) -> RunDirectory:
    chosen = resolved.fields.run_dir
    return RunDirectory.default(None if chosen is None else str(chosen))


def serve_parser() -> FlagParser:
    parser = parser_of("serve", "Serve plans and pools on the run directory's Unix socket.")
    parser.add_argument(
        "--ready-fd", type=int, metavar="FD", help="write a line to this descriptor when every worker answers"
    )
    return parser


def _check_writable(fd: int) -> None:
    """Raises `SpecInvalid` for what cannot be written to: else whoever waits for the line would wait for ever."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    except (OSError, ValueError, OverflowError):  # not open, negative, no descriptor at all
        raise SpecInvalid(f"--ready-fd {fd} is not open in this process; pass a descriptor on to it") from None
    if flags & os.O_ACCMODE == os.O_RDONLY:
        raise SpecInvalid(f"--ready-fd {fd} is open for reading only; pass the end of the pipe that is written to")
