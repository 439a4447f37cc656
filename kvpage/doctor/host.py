"""Host memory, the limits of this process, and the namespaces it is in."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from kvpage.doctor.findings import Finding
from kvpage.errors import ProtocolError
from kvpage.memory.host import HostMemory

_TRIAL_BYTES = 1 << 20
_ENOUGH_FILES = 4096
_SO_PEERPIDFD = 77  # asm-generic/socket.h, Linux 6.5; no constant in Python 3.11


def check_memory() -> Iterator[Finding]:
    """Create, share and map a little memory, and write through one mapping what is read through the other."""
    memory = HostMemory()
    with memory.create(_TRIAL_BYTES) as chunk, memory.import_chunk(chunk.export(), _TRIAL_BYTES) as again:
        with chunk.map() as one, again.map() as other:
            memoryview(one.buffer).cast("B")[7] = 1
            if memoryview(other.buffer).cast("B")[7] != 1:
                raise ProtocolError("host memory was shared, but what one side wrote the other did not see")
    yield Finding("host memory", "ok", f"shared by memfd; {memory.available_bytes():,} bytes could be committed now")


def check_limits(limits: tuple[int, int] | None = None) -> Iterator[Finding]:
    """`limits`: soft and hard number of open files; None for those of this process."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < _ENOUGH_FILES:
        advice = f"raise it (ulimit -Hn {_ENOUGH_FILES}, LimitNOFILE=): every client and pool of a worker takes some"
        yield Finding("open files", "problem", f"at most {hard}", advice)
    else:
        yield Finding("open files", "ok", f"{soft}, may be raised to {'any number' if hard < 0 else hard}")


def check_namespaces() -> Iterator[Finding]:
    inside = Path("/.dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ
    names = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "ipc", "user")}
    where = "a container" if inside else "no container that could be recognised"
    text = f"{where}; {', '.join(names.values())}"
    yield Finding("namespaces", "ok", f"{text}: sharing needs a common run directory, none of these")
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
            known = True
        except OSError as error:
            known = error.errno != 92  # ENOPROTOOPT: the kernel does not know the option
    if not known:
        yield Finding("peer pidfd", "absent", "this kernel cannot name a peer by pidfd", "Linux 6.5 or newer can")
