"""What `kvpage serve` was asked for, as the rest of the server uses it. `configured` makes it from flags, variables and
a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvpage.errors import SpecInvalid
from kvpage.run_directory import RunDirectory
from kvpage_server.exposure import check_exposure, check_has_port
from kvpage_server.intake import IntakeLimits
from kvpage_server.tls_files import TlsFiles
from kvpage_server.unix_group import gid_of
from kvpage_server.worker_budget import parse_memory

LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_HOST = "127.0.0.1"
DEFAULT_INTAKE = IntakeLimits()
DEFAULT_ADOPT_WITHIN_S = 10.0
DEFAULT_RATE_LIMIT_PER_S = 100.0
DEFAULT_PLAN_CACHE_BYTES = 8 * 1024 * 1024  # plans of some 15,000 layers; the whole process stays under 90 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Complete and checked; made by `configured`, or directly in tests."""

    run_directory: RunDirectory
    devices: tuple[str, ...] = ("host",)
    """Devices served, in order."""
    external_workers: bool = False
    """Whether something else starts the workers (an init system); then this server never starts or ends one."""
    leave_workers: bool = False
    """Whether workers go on when the server ends."""
    memory: str | None = None
    """Passed on to workers: bytes, or a fraction of what is available."""
    adopt_within_s: float = DEFAULT_ADOPT_WITHIN_S
    """Passed on to workers: how long clients wait for pools that outlived the worker before."""
    group: str | None = None
    """Unix group, by name or number, that may use the server and its workers."""
    host: str = DEFAULT_HOST
    port: int | None = None
    """TCP port, 0 for any free one; None: the Unix socket only."""
    token_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    """Whose certificates clients must show; None: none need to."""
    insecure: bool = False
    """Whether an address that other machines reach may be served without TLS."""
    fleet: str | None = None
    """Address of the Ray cluster whose fleet this server is the head of."""
    audit_log: Path | None = None
    rate_limit_per_s: float = DEFAULT_RATE_LIMIT_PER_S
    """Of requests that change something, with each token over TCP."""
    log_format: LogFormat = "auto"
    log_level: LogLevel = "info"
    ready_fd: int | None = None
    """Descriptor to write one line to, and close, when every worker answers."""
    intake: IntakeLimits = DEFAULT_INTAKE
    plan_cache_bytes: int = DEFAULT_PLAN_CACHE_BYTES

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise SpecInvalid(f"devices {list(self.devices)} must be at least one, each once")
        for device in self.devices:
            self.run_directory.worker_socket(device)  # refuses odd names and long paths before anything is made
        if self.memory is not None:
            parse_memory(self.memory)
        if self.group is not None:
            gid_of(self.group)
        if self.port is not None and not 0 <= self.port <= 65535:
            raise SpecInvalid(f"port {self.port} is not between 0 and 65535")
        files = ("token_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
        given = {name: getattr(self, name) is not None for name in files}
        if self.port is None:
            check_has_port(self.host, given, insecure=self.insecure)
        else:
            check_exposure(self.host, given, insecure=self.insecure)

    @property
    def tls_files(self) -> TlsFiles | None:
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return TlsFiles(cert=self.tls_cert_file, key=self.tls_key_file, client_ca=self.tls_client_ca_file)

    @property
    def group_gid(self) -> int | None:
        return None if self.group is None else gid_of(self.group)
