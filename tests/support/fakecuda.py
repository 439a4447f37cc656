"""The driver double: a `libcuda.so.1` of our own whose device memory is host memory (see tests/fakecuda/README.md).

A test makes `FakeDevices` and starts processes with its `env()`. In such a process `live` counts what the double holds
there, and `set_faults` changes what fails next.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from support.checkout import ROOT

SOURCES = ROOT / "tests" / "fakecuda"
LIBRARY = "libcuda.so.1"
COMPILE = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread")
LINK = ("-shared", f"-Wl,-soname,{LIBRARY}")
MIB = 1 << 20

_F_OFD_GETLK = 36  # linux/fcntl.h; Python has no name for it
_FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid


@cache
def compiler() -> str:
    """The system's C compiler. Skips the test when there is none."""
    found = shutil.which("cc")
    if found is None:
        import pytest  # here, because processes under test import this module too

        pytest.skip("the driver double needs a C compiler, and there is no `cc` on the path")
    return found


def sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h"})


@cache
def library() -> Path:
    """The compiled double, made once for this state of its sources. Skips the test when there is no compiler."""
    digest = hashlib.sha256("\0".join([compiler(), *COMPILE, *LINK]).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    built = _cache_folder() / digest.hexdigest()[:16] / LIBRARY
    if not built.exists():
        build(built)
    return built


def build(target: Path) -> None:
    """Compile to `target` in one step, so that whoever else does the same at once sees all of it or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / LIBRARY
        files = [str(path) for path in sources() if path.suffix == ".c"]
        command = [compiler(), *COMPILE, *LINK, "-o", str(made), *files]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), "the driver double does not compile cleanly"
        made.replace(target)


def _cache_folder() -> Path:
    """Outside the checkout. Ours alone, because its content is loaded as code."""
    folder = Path(tempfile.gettempdir()) / f"kvpage-fakecuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    assert (status.st_uid, status.st_mode & 0o022) == (os.getuid(), 0), f"{folder} is not only ours to write to"
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeDevice:
    """One GPU or MIG instance, and what its driver can do."""

    uuid: str
    """`GPU-…` or `MIG-…`, as it is called everywhere."""
    total_bytes: int = 64 * MIB
    granularity_bytes: int = 2 * MIB
    """A multiple of 4096."""
    vmm: bool = True
    posix_fd: bool = True
    ipc: bool = True

    @property
    def uuid_bytes(self) -> bytes:
        return uuid.UUID(self.uuid[4:]).bytes

    def line(self) -> str:
        facts = {
            "uuid": self.uuid_bytes.hex(),
            "total_bytes": self.total_bytes,
            "granularity_bytes": self.granularity_bytes,
            "mig": int(self.uuid.startswith("MIG-")),
            "vmm": int(self.vmm),
            "posix_fd": int(self.posix_fd),
            "ipc": int(self.ipc),
        }
        return " ".join(f"{key}={value}" for key, value in facts.items()) + "\n"


def fake_uuid(number: int, prefix: str = "GPU") -> str:
    """The UUID of the `number`-th device when a test does not care; the same in every run."""
    return f"{prefix}-{uuid.uuid5(uuid.NAMESPACE_OID, f'kvpage fake device {number}')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a driver function by any process, as the double logged it."""

    pid: int
    tid: int
    function: str
    """Without the `_v2` of its binary name."""
    arguments: str
    result: str
    """A CUresult as a number, or "killed"."""
    note: str
    """What came out, "injected", or "undefined: …" where the real driver promises nothing."""


class FakeDevices:
    """A state directory: what processes that share it see as one machine with these devices. Gone after `with`."""

    def __init__(
        self,
        devices: int | Sequence[FakeDevice] = 1,
        *,
        total_bytes: int = 64 * MIB,
        granularity_bytes: int = 2 * MIB,
    ) -> None:
        """`devices`: how many alike ones, of the given size, or each one described."""
        if isinstance(devices, int):
            devices = [
                FakeDevice(uuid=fake_uuid(number), total_bytes=total_bytes, granularity_bytes=granularity_bytes)
                for number in range(devices)
            ]
        self.devices = tuple(devices)
        shared_memory = Path("/dev/shm")  # chunks are files; nothing has to reach a disk
        self.folder = Path(tempfile.mkdtemp(prefix="kvp-gpu-", dir=shared_memory if shared_memory.is_dir() else None))
        (self.folder / "devices").write_text("".join(device.line() for device in self.devices))

    @property
    def uuids(self) -> list[str]:
        return [device.uuid for device in self.devices]

    def env(
        self, *, faults: str = "", log: bool = False, visible: str | None = None, fill: str | None = None
    ) -> dict[str, str]:
        """What to add to the environment of a process that uses these devices.

        `faults`: `function:nth:action` items (README). `log`: whether `log()` hears of it. `visible`:
        CUDA_VISIBLE_DEVICES. `fill`: the byte that fresh memory holds, as a number, or "none" for zeros.
        """
        inherited = os.environ.get("LD_LIBRARY_PATH", "")
        added = {
            "LD_LIBRARY_PATH": f"{library().parent}:{inherited}".rstrip(":"),
            "KVPAGE_FAKECUDA_DIR": str(self.folder),
            "KVPAGE_FAKECUDA_FAULTS": faults,
            "KVPAGE_FAKECUDA_LOG": str(self._log) if log else "",
        }
        if visible is not None:
            added["CUDA_VISIBLE_DEVICES"] = visible
        if fill is not None:
            added["KVPAGE_FAKECUDA_FILL"] = fill
        return added

    def used_bytes(self, device_uuid: str) -> int:
        """Bytes of the device that any process still holds, be it only as a descriptor in an unread message."""
        prefix = uuid.UUID(device_uuid[4:]).hex
        with (self.folder / "ledger").open("a") as ledger:
            fcntl.flock(ledger, fcntl.LOCK_SH)
            return sum(_held_bytes(chunk) for chunk in self.folder.glob(f"{prefix}-*"))

    def log(self) -> list[Call]:
        """Every call so far, in order, of the processes that log. Fails when none was told to."""
        assert self._log.exists(), "no process has logged a call: start it with env(log=True)"
        return list(self._calls())

    def _calls(self) -> Iterator[Call]:
        for line in self._log.read_text().splitlines():
            pid, tid, function, arguments, result, note = line.split("\t")
            yield Call(
                pid=int(pid), tid=int(tid), function=function, arguments=arguments.strip(), result=result, note=note
            )

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held_bytes(chunk: Path) -> int:
    """Size of a chunk whose first byte any open file has locked (tests/fakecuda/chunks.c), else 0."""
    wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        with chunk.open("r+b") as file:
            found = fcntl.fcntl(file, _F_OFD_GETLK, wanted)
            return os.fstat(file.fileno()).st_size if struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK else 0
    except FileNotFoundError:  # its owner has freed it since it was listed
        return 0


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("handles", "mappings", "mapped_bytes", "reservations", "reserved_bytes"),
            *("allocations", "opened", "contexts", "streams"),
        )
    ]


def live() -> dict[str, int]:
    """What the double holds in this process, by the names in `kvpage_fakecuda_counts` (tests/fakecuda/entries.c)."""
    counts = _Counts()
    ctypes.CDLL(LIBRARY).kvpage_fakecuda_live(ctypes.byref(counts))
    return {name: int(getattr(counts, name)) for name, *_ in _Counts._fields_}


def set_faults(schedule: str) -> None:
    """Replace this process's fault schedule and count its calls anew; "" ends it. Raises ValueError for a bad one."""
    if ctypes.CDLL(LIBRARY).kvpage_fakecuda_set_faults(schedule.encode()) != 0:
        raise ValueError(f"not a fault schedule: {schedule!r}; it is function:nth:action, separated by commas")
