"""The folder in which the processes of one kvpage installation find each other."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvpage.errors import PermissionDenied, SpecInvalid, TooLarge, shorten

MAX_SOCKET_PATH_BYTES = 107  # sun_path in <sys/un.h> is 108 bytes, the last one a zero
SYSTEM_RUN_DIRECTORY = Path("/run/kvpage")
API_SOCKET = "kvpage.sock"

_DEVICE = re.compile(r"host|cuda:[0-9]{1,4}|[A-Za-z][A-Za-z0-9._-]{0,79}")
_WORKER_SOCKET = re.compile(r"worker-(.*)\.sock", re.DOTALL)
_NUMBERED = re.compile(r"cuda-([0-9]{1,4})")


def device_file_name(device: str) -> str:
    """How `device` is spelt in file names: `cuda:0` becomes `cuda-0`, `host` and UUIDs stay as they are."""
    if not _DEVICE.fullmatch(device) or ".." in device or _NUMBERED.fullmatch(device):
        raise SpecInvalid(
            f"device {shorten(repr(device))} is not a device name; use 'host', 'cuda:<number>' or a GPU UUID",
            details={"device": shorten(device)},
        )
    return device.replace(":", "-")


def _device_of(file_name: str) -> str:
    numbered = _NUMBERED.fullmatch(file_name)
    return f"cuda:{numbered[1]}" if numbered else file_name


def checked_socket_path(path: Path) -> Path:
    """`path`, refused when no Unix socket can have so long a name."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise TooLarge(
            f"socket path {shorten(str(path))} has {length} bytes, the limit is {MAX_SOCKET_PATH_BYTES};"
            " choose a shorter --run-dir or KVPAGE_RUN_DIR",
            details={"length_bytes": length, "limit_bytes": MAX_SOCKET_PATH_BYTES},
        )
    return path


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names every file kvpage keeps in its folder. Naming a file touches nothing; only `create` does."""

    path: Path

    @classmethod
    def default(cls, explicit: str | None = None, *, system: Path = SYSTEM_RUN_DIRECTORY) -> RunDirectory:
        """The folder asked for, else the first of: KVPAGE_RUN_DIR, /run/kvpage if this user may write to it or connect
        to a socket in it, $XDG_RUNTIME_DIR/kvpage, a private folder of this user among the temporary files.
        """
        chosen = explicit or os.environ.get("KVPAGE_RUN_DIR")
        if chosen:
            return cls(Path(chosen).absolute())
        if os.access(system, os.W_OK | os.X_OK) or _has_socket_for_us(system):
            return cls(system)
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if runtime:
            return cls(Path(runtime).absolute() / "kvpage")
        private = Path(tempfile.gettempdir()) / f"kvpage-{os.geteuid()}"
        if os.path.lexists(private):
            _check_private(private)  # anybody may make a folder of this name: never talk to what waits in theirs
        return cls(private)

    @property
    def api_socket(self) -> Path:
        return checked_socket_path(self.path / API_SOCKET)

    def worker_socket(self, device: str) -> Path:
        return checked_socket_path(self.path / f"worker-{device_file_name(device)}.sock")

    def worker_lock(self, device: str) -> Path:
        return self.path / f"worker-{device_file_name(device)}.lock"

    def worker_log(self, device: str) -> Path:
        return self.path / f"worker-{device_file_name(device)}.log"

    def worker_sockets(self) -> list[tuple[str, Path]]:
        """Device and socket of every worker that left one here, sorted by device; it may no longer live."""
        try:
            names = os.listdir(self.path)  # each time that somebody attaches, and `glob` takes longer
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []
        devices = {name: match[1] for name in names if (match := _WORKER_SOCKET.fullmatch(name))}
        return sorted((_device_of(device), self.path / name) for name, device in devices.items())

    def create(self, group: int | None = None) -> None:
        """Make the folder: mode 0700, or 0750 and owned by the group id `group`.

        A folder that exists is used as it is, unless another user owns it or others may write to it. Raises `TooLarge`
        before anything is made when no socket can be in it, `PermissionDenied`.
        """
        checked_socket_path(self.path / API_SOCKET)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PermissionDenied(
                f"cannot make the run directory {self.path}: {error.strerror}; choose another with --run-dir"
            ) from error
        _check_private(self.path)
        if group is not None:
            os.chown(self.path, -1, group)
            self.path.chmod(0o750)


def _has_socket_for_us(path: Path) -> bool:
    """Whether a server or worker there admits this user: connecting to a Unix socket takes the right to write to it."""
    sockets = [path / API_SOCKET, *path.glob("worker-*.sock")]
    return any(os.access(socket, os.W_OK) and socket.is_socket() for socket in sockets)


def _check_private(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionDenied(f"the run directory {path} is not a folder; choose another with --run-dir")
    if status.st_uid != os.geteuid():
        raise PermissionDenied(
            f"the run directory {path} belongs to uid {status.st_uid}, this process runs as uid {os.geteuid()};"
            " choose another with --run-dir"
        )
    if status.st_mode & 0o022:
        raise PermissionDenied(
            f"the run directory {path} has mode {stat.S_IMODE(status.st_mode):04o}: others may write to it;"
            " use chmod go-w, or choose another with --run-dir"
        )
